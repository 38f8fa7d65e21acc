"""PID 1 of a container until the sandbox's command takes its place; started with the path of the runtime's socket.

One message over that socket says what to become: command, environment, folder, system call filter; with it come the
descriptors that the command is to have as 3, 1 and 2. The socket closes when the command runs, or says why it does not.
We have no privileges from the start: the engine gave us the sandbox's uid and took all capabilities.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(sys.argv[1])
        number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 10)  # out of the way of the command's
    with socket.socket(fileno=number) as runtime:
        text, descriptors, _, _ = socket.recv_fds(runtime, 1 << 18, 2)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        order = json.loads(text)
        home = Path(order["environment"]["HOME"])
        home.mkdir()
        home.chmod(0o1777)
        os.chdir(order["folder"])
        os.umask(0o022)
        if not order["as_pid_1"] and (child := os.fork()):
            runtime.close()
            for descriptor in descriptors:
                os.close(descriptor)
            reap(child)
        try:
            become(order, *descriptors)
        except OSError as error:
            runtime.send(f"{order['command'][0]}: {error.strerror}".encode())
    os._exit(127)


def become(order: dict[str, Any], channel: int, output: int) -> None:
    """Give the command its descriptors and run it; all others are closed on the way."""
    null = os.open("/dev/null", os.O_RDONLY)
    sources = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, 10) for source in (null, output, output, channel)]
    for target, source in enumerate(sources):
        os.dup2(source, target)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    refuse(bytes.fromhex(order["refused"]))
    command = order["command"]
    os.execvpe(command[0], command, order["environment"])


def refuse(program: bytes) -> None:
    """Put a system call filter in front of the engine's own."""
    if not program:
        return
    instructions = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    filter = Filter(len(program) // 8, ctypes.addressof(instructions))
    if libc.prctl(22, 2, ctypes.byref(filter), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reap(child: int) -> None:
    """Wait for all that die here, and end as the command does, which ends everything."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
