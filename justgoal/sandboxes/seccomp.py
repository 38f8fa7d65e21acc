"""System calls that no sandbox may make: they reach memory that outlives a process and belongs to no namespace, or
are large and of no use here.

The kernel's keyrings belong to a uid: one process of a solution could leave hidden inputs there for the agent to read.
Where sandboxes are stopped by signals, nobody in there may have the kernel send him one of his choice later on: that
would wake him up while he is frozen.
"""

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    # add_key, request_key, keyctl, bpf, userfaultfd, perf_event_open, io_uring_setup, _enter, _register
    "x86_64": (248, 249, 250, 321, 323, 298, 425, 426, 427),
    "aarch64": (217, 218, 219, 280, 282, 241, 425, 426, 427),
}
_TIMER_CREATE, _FCNTL = {"x86_64": 222, "aarch64": 107}, {"x86_64": 72, "aarch64": 25}
_F_SETSIG = 10
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURE, _NUMBER, _SECOND_ARGUMENT = 4, 0, 24
_X32 = 0x40000000


def program(*, alarms: bool) -> bytes:
    """The filter as bubblewrap's --seccomp reads it: BPF instructions, 8 bytes each. Empty on other machines.

    A refused call fails with EPERM; calls of another architecture end the process. Without `alarms` there is no
    timer_create (ENOSYS, so that `timeout` makes do with what it has), and no F_SETSIG.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return b""
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
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
    if not alarms:
        instructions += [(_EQUAL, 0, 1, _TIMER_CREATE[machine]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
        instructions += [(_EQUAL, 0, 3, _FCNTL[machine]), (_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 0, 1, _F_SETSIG)]
        instructions += [refuse]
    instructions.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
