"""System calls that no sandbox may make: they reach what outlives a process and belongs to no namespace, or are large
and of no use here.

The kernel's keyrings belong to a uid: one process of a solution could leave hidden inputs there for the agent to read.
In a user namespace of its own a process has every capability: it could mount memory without a limit, and have the
kernel's network work for it while it is frozen itself. What lies in the page cache is the same for every sandbox: who
evicts files, and asks which are there, writes and reads. Where sandboxes are stopped by signals, nobody in there may
have the kernel send him one of his choice later on: that would wake him up while he is frozen.
"""

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # add_key, request_key, keyctl, bpf, userfaultfd, perf_event_open, io_uring_setup, _enter, _register,
    # unshare, setns, mount, umount2, pivot_root,
    # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    "x86_64": (248, 249, 250, 321, 323, 298, 425, 426, 427,
               272, 308, 165, 166, 155, 428, 429, 430, 431, 432, 433, 442),
    "aarch64": (217, 218, 219, 280, 282, 241, 425, 426, 427,
                97, 268, 40, 39, 41, 428, 429, 430, 431, 432, 433, 442),
}  # fmt: skip
_CLONE, _FADVISE = {"x86_64": 56, "aarch64": 220}, {"x86_64": 221, "aarch64": 223}
_CLONE3, _CACHESTAT = 435, 451
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
_DONTNEED = 4
_TIMER_CREATE, _FCNTL = {"x86_64": 222, "aarch64": 107}, {"x86_64": 72, "aarch64": 25}
_F_SETSIG = 10
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURE, _NUMBER, _ARGUMENT = 4, 0, 16  # where they lie; arguments have 8 bytes each, the lower half first
_X32 = 0x40000000
Instruction = tuple[int, int, int, int]


def program(*, alarms: bool) -> bytes:
    """The filter as bubblewrap's --seccomp reads it: BPF instructions, 8 bytes each. Empty on other machines.

    A refused call fails with EPERM; calls of another architecture end the process. clone3, whose flags a filter cannot
    see, is not there (ENOSYS: libraries then use clone). Advice to evict a file is taken and not followed. Without
    `alarms` there is no timer_create (ENOSYS, so that `timeout` makes do with what it has), and no F_SETSIG.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return b""
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    ignore = (_RETURN, 0, 0, _ERROR)
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
    ]
    for number in _REFUSED[machine]:
        instructions += [(_EQUAL, 0, 1, number), refuse]
    for number in (_CLONE3, _CACHESTAT, *(() if alarms else (_TIMER_CREATE[machine],))):
        instructions += [(_EQUAL, 0, 1, number), absent]
    instructions += _when(_CLONE[machine], 0, _ANY_BIT, _NEW_NAMESPACES, refuse)
    instructions += _when(_FADVISE[machine], 3, _EQUAL, _DONTNEED, ignore)
    if not alarms:
        instructions += _when(_FCNTL[machine], 1, _EQUAL, _F_SETSIG, refuse)
    instructions.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _when(number: int, argument: int, test: int, value: int, verdict: Instruction) -> list[Instruction]:
    """`verdict` on calls of this number whose argument (its lower 32 bits) passes the test."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _ARGUMENT + 8 * argument),
        (test, 0, 1, value),
        verdict,
        (_LOAD, 0, 0, _NUMBER),
    ]
