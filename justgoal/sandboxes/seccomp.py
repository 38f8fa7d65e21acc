"""System calls that no sandbox may make: they reach memory that outlives a process and belongs to no namespace, or
are large and of no use here.

The kernel's keyrings belong to a uid: one process of a solution could leave hidden inputs there for the agent to read.
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
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_X32 = 0x40000000


def program() -> bytes:
    """The filter as bubblewrap's --seccomp reads it: BPF instructions, 8 bytes each. Empty on other machines.

    A refused call fails with EPERM; calls of another architecture end the process.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return b""
    numbers = _REFUSED[machine]
    instructions = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number
        (_AT_LEAST, len(numbers) + 1, 0, _X32),
        *((_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, 0x00050000 | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
