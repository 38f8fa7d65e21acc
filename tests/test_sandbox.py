"""Real sandboxes: every border is tried from inside."""

import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from justgoal import owners
from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import UID, Engine, Limits, Mount, Sandbox, Spec, cgroups, daemon, engines, mounts

pytestmark = pytest.mark.docker

MIB = 1 << 20
PYTHON = "/opt/venv/bin/python"
Start = Callable[..., Sandbox]


@pytest.fixture
def start(engine: Engine) -> Iterator[Start]:
    """Start a Python program in a sandbox."""
    started = []

    def run(
        code: str,
        memory: int = 512 * MIB,
        pids: int = 64,
        cpus: float = 2,
        mounted: tuple[Mount, ...] = (),
        tmpfs: dict[str, int] | None = None,
    ) -> Sandbox:
        sandbox = engine.start(
            Spec("worker", (PYTHON, "-c", code), Limits(memory, pids, cpus), UID, mounted, tmpfs or {})
        )
        started.append(sandbox)
        return sandbox

    yield run
    for sandbox in started:
        sandbox.close()


def printed(sandbox: Sandbox, status: int | None = 0) -> str:
    """All that the command printed, once it has ended as expected."""
    text = b""
    deadline = time.monotonic() + 60
    ended = None
    while ended is None and time.monotonic() < deadline:
        ended = sandbox.exit_status(0.01)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(sandbox.output, 1 << 16):
                text += chunk
    assert ended == status, text.decode()
    return text.decode()


def test_identity(start: Start) -> None:
    text = printed(start("print(open('/proc/self/status').read())"))
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
    assert fields["Uid"] == fields["Gid"] == [str(UID)] * 4
    assert fields["Groups"] in ([], [str(UID)])  # Docker adds the user's own
    assert {int(fields[f"Cap{kind}"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert fields["NoNewPrivs"] == ["1"]


def test_inherits_nothing(start: Start) -> None:
    inside = printed(
        start(
            "import os, json; print(json.dumps([sorted(os.listdir('/proc/self/fd')), "
            "dict(os.environ), os.readlink('/proc/self/fd/0')]))"
        )
    )
    descriptors, environment, stdin = json.loads(inside)
    assert descriptors == ["0", "1", "2", "3", "4"]  # 4 is the listing itself
    assert stdin == "/dev/null"
    assert set(environment) <= {
        "HOME",
        "LANG",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PWD",
        "TERM",
        "TMPDIR",
        "USER",
        "LC_CTYPE",
    }


def test_channel_is_descriptor_3(start: Start) -> None:
    sandbox = start("import socket; s = socket.socket(fileno=3); s.sendall(s.recv(10)[::-1])")
    sandbox.channel.sendall(b"abc")
    assert sandbox.channel.recv(10) == b"cba"


def test_packages(start: Start) -> None:
    code = """
import importlib.util, sys
print([name for name in ("torch", "numpy", "sympy") if importlib.util.find_spec(name) is None],
      [name for name in ("justgoal", "anthropic", "rich", "pytest", "pip", "yaml") if importlib.util.find_spec(name)],
      sys.prefix, sys.base_prefix)
"""
    assert printed(start(code)).split() == ["[]", "[]", "/opt/venv", "/opt/python"]


def test_torch_and_a_compiler(start: Start) -> None:
    code = """
import os, subprocess, sysconfig, torch
open("/tmp/m.cpp", "w").write("#include <Python.h>\\n#include <vector>\\nint main() { return PY_MAJOR_VERSION; }")
include = sysconfig.get_path("include")
subprocess.run(["g++", "-fopenmp", f"-I{include}", "/tmp/m.cpp", "-o", "/tmp/m"], check=True)
print(int(torch.ones(2).sum()), subprocess.run(["/tmp/m"]).returncode)
"""
    assert printed(start(code)) == "2 3\n"


@pytest.mark.slow
def test_torch_compile(start: Start) -> None:
    code = """
import torch
f = torch.compile(lambda x: (x * 2).relu().sum(-1), fullgraph=True)
print(f(torch.ones(3, 4)).tolist())
"""
    assert "[8.0, 8.0, 8.0]" in printed(start(code, memory=4096 * MIB, tmpfs={"/tmp": 1024 * MIB}))


@contextmanager
def planted(token: str) -> Iterator[None]:
    """Files named and filled with a secret word, where a host keeps its own."""
    places = [
        Path("/root"),
        Path("/home"),
        Path("/opt"),
        Path("/etc"),
        Path("/srv"),
        Path("/var/tmp"),
        Path("/tmp"),
        Path(__file__).parents[1] / "runs",
        Path.home(),
    ]
    files = [place / f"canary-{token}" for place in places if os.access(place, os.W_OK)]
    try:
        for file in files:
            file.write_text(token)
            file.chmod(0o644)
        yield
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_host_is_hidden(start: Start, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    token = secrets.token_hex(8)
    monkeypatch.setenv("CANARY", token)
    code = """
import os, pathlib
names = [os.path.join(folder, name) for folder, folders, files in os.walk("/") for name in folders + files]
seen = " ".join(names)
for file in ("mounts", "mountinfo", "cgroup", "environ", "cmdline"):
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            seen += (folder / file).read_bytes().decode(errors="replace")
        except OSError:
            pass
print(os.path.exists("/root"), os.path.exists("/home"), sorted(os.listdir("/opt")), sorted(os.listdir("/etc")))
print(seen)
"""
    with planted(token):
        first, _, seen = printed(start(code)).partition("\n")
    etc = ["alternatives", "group", "hostname", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "passwd"]
    docker = ["mtab", "resolv.conf"] if engine.name == "docker" else []
    assert first == f"False False ['python', 'venv'] {sorted(etc + docker)}"
    assert token not in seen
    assert str(Path(__file__).parents[1]) + "/" not in seen
    assert f" {Path.home()}/" not in seen
    assert sys.base_prefix == "/usr" or sys.base_prefix not in seen


def test_nothing_is_writable_but_tmpfs(start: Start) -> None:
    code = """
import os
def writable(folder):
    try:
        open(os.path.join(folder, "x"), "w").close()
        return True
    except OSError:
        return False
folders = [os.path.join(f, n) for f, ns, _ in os.walk("/") if not f.startswith(("/proc", "/usr/lib/")) for n in ns]
print(sorted(folder for folder in ["/", *folders] if writable(folder)))
"""
    assert printed(start(code)) == "['/dev/shm', '/tmp', '/tmp/home']\n"


def test_sees_no_process_of_the_host(start: Start) -> None:
    code = "import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    numbers = json.loads(printed(start(code)))
    assert numbers[0] == 1 and len(numbers) == 2 and numbers[1] < 20  # some numbers are spent before our launcher's


def test_no_network(start: Start) -> None:
    code = """
import socket, sys
print([name for _, name in socket.if_nameindex()])
for family, address in ((socket.AF_INET, ("127.0.0.1", int(sys.stdin.read() or PORT))),
                        (socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_UNIX, "\\0NAME")):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
    name = f"justgoal-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        text = printed(start(code.replace("PORT", str(server.getsockname()[1])).replace("NAME", name)))
    assert text.splitlines() == [
        "['lo']",
        "ConnectionRefusedError",
        "OSError",
        "ConnectionRefusedError",
    ] or text.splitlines() == ["['lo']", "OSError", "OSError", "ConnectionRefusedError"]


def test_memory_limit(start: Start, engine: Engine) -> None:
    """Of all processes together; where there is no control group, of each."""
    sandbox = start("x = bytearray(400 << 20)", memory=128 * MIB)
    if not engine.limited:
        assert printed(sandbox, 1).splitlines()[-1] == "MemoryError"
        return
    assert sandbox.exit_status(60) == -signal.SIGKILL
    assert sandbox.memory_kills() == 1


def test_tmpfs_is_limited(start: Start) -> None:
    code = """
for path in ("/tmp/x", "/dev/shm/x"):
    try:
        with open(path, "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        print(path, error.strerror)
"""
    text = printed(start(code, tmpfs={"/tmp": 16 * MIB}, memory=256 * MIB))
    assert text == "/tmp/x No space left on device\n/dev/shm/x No space left on device\n"


def test_process_limit(start: Start) -> None:
    code = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(100)
        n += 1
except OSError as error:
    print(n, error.strerror, flush=True)
os._exit(0)
"""
    count, _, reason = printed(start(code, pids=20)).partition(" ")
    assert 15 <= int(count) <= 20
    assert reason == "Resource temporarily unavailable\n"


def test_cpu_limit(start: Start, engine: Engine) -> None:
    if not engine.limited:
        pytest.skip("there is no control group, and nothing else limits processor time")
    code = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        while True:
            pass
began = time.monotonic()
while time.monotonic() - began < 1.5:
    pass
used = sum(int(x) for n in os.listdir("/proc") if n.isdigit() for x in open(f"/proc/{n}/stat").read().split()[13:15])
print(used / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began), flush=True)
os._exit(0)
"""
    assert float(printed(start(code, cpus=0.5))) < 0.75


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_exit_status(start: Start, code: str, status: int) -> None:
    sandbox = start(code)
    assert sandbox.exit_status(60) == status
    assert not sandbox.alive()


def test_exit_status_waits(start: Start) -> None:
    sandbox = start("import time; time.sleep(100)")
    assert sandbox.exit_status(0.05) is None
    assert sandbox.alive()


COUNT = """
import socket
s = socket.socket(fileno=3)
while True:
    s.sendall(b".")
"""


def moves(sandbox: Sandbox) -> bool:
    """Whether it goes on sending, once what it sent before is read."""
    sandbox.channel.settimeout(0.2)
    deadline = time.monotonic() + 0.3
    try:
        while time.monotonic() < deadline:
            sandbox.channel.recv(1 << 20)
    except TimeoutError:
        return False
    return True


def test_freeze(start: Start) -> None:
    sandbox = start(COUNT)
    assert sandbox.channel.recv(1) == b"."
    for _ in range(2):
        sandbox.freezer.freeze()
        assert sandbox.freezer.frozen()
        assert not moves(sandbox)
        sandbox.freezer.thaw()
        assert not sandbox.freezer.frozen()
        assert moves(sandbox)


STORM = """
import os, signal, socket, time
channel = socket.socket(fileno=3)
def storm(waking):
    os.setsid()
    others = []
    while True:
        if waking:
            for other in others[-20:]:
                try:
                    os.kill(other, signal.SIGCONT)
                except OSError:
                    pass
        try:
            other = os.fork()
        except OSError:
            time.sleep(0.001)
            continue
        if other == 0:
            os.setsid()
            channel.send(b".")
            time.sleep(0.02)
            os._exit(0)
        others.append(other)
        if len(others) > 20:
            os.waitpid(others.pop(0), 0)
for number in range(4):
    if os.fork() == 0:
        storm(number % 2)
time.sleep(1000)
"""


def test_freeze_outruns_a_storm(start: Start) -> None:
    """Processes that start others, leave their sessions and wake each other up."""
    sandbox = start(STORM, pids=200)
    assert sandbox.channel.recv(1) == b"."
    for _ in range(5):
        sandbox.freezer.freeze()
        assert sandbox.freezer.frozen()
        assert not moves(sandbox)
        sandbox.freezer.thaw()
        assert moves(sandbox)


def test_close_leaves_nothing(start: Start) -> None:
    token = secrets.token_hex(8)
    mounted = Path("/proc/self/mountinfo").read_text()
    sandbox = start(f"""
import os, time, socket
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execv("/usr/bin/sleep", ["{token}", "1000"])
time.sleep(0.2)
socket.socket(fileno=3).send(b"x")
time.sleep(1000)
""")
    assert sandbox.channel.recv(1) == b"x"
    assert len(processes_with(token)) >= 6  # 5 and the program itself; what starts it shows it too
    sandbox.freezer.freeze()
    sandbox.close()
    sandbox.close()
    assert processes_with(token) == []
    assert not any(folder.exists() for folder in groups(sandbox))
    assert Path("/proc/self/mountinfo").read_text() == mounted


def groups(sandbox: Sandbox) -> list[Path]:
    """Folders of its control group, if it has one."""
    group = sandbox._group  # type: ignore[attr-defined]
    return group.unique() if isinstance(group, cgroups.Group) else []


def processes_with(token: str) -> list[int]:
    """Processes, other than this one and dead ones, whose command line has the word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_dies_with_the_runtime(engine: Engine) -> None:
    """A killed runtime's sandbox dies, even a frozen one as soon as the next runtime starts."""
    token = secrets.token_hex(8)
    program = f"""
import time
from justgoal.sandboxes import UID, Limits, Spec, cgroups, engines
engine = engines.choose({engine.name!r})
spec = Spec("w", ("/usr/bin/bash", "-c", "read <&3", "{token}"), Limits(1 << 28, 64, 2), UID)
sandboxes = [engine.start(spec) for _ in range(2)]
sandboxes[0].freezer.freeze()
groups = [sandbox._group for sandbox in sandboxes if engine.limited]
print(*(folder for group in groups for folder in group.unique()), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as runtime:
        assert runtime.stdout
        folders = runtime.stdout.readline().split()
        assert bool(folders) == engine.limited and len(processes_with(token)) >= 2
        runtime.kill()
    engines.choose(engine.name).close()
    assert processes_with(token) == []
    assert not any(Path(folder).exists() for folder in folders)


NOT_A_FOLDER = {
    "bubblewrap": r"^a sandbox did not start: bwrap: .* /etc/passwd/x: Not a directory$",
    "docker": r"^cannot start a sandbox: the Docker Engine says: .*/etc/passwd/x.*not a directory",
}


def test_cannot_start(engine: Engine, tmp_path: Path) -> None:
    """What is wrong is said, and nothing is left behind."""
    limits = Limits(128 * MIB, 16, 1)
    before = sandboxes(engine)
    with pytest.raises(Fatal, match=r"cannot mount .*/gone: it does not exist"):
        engine.start(Spec("worker", ("true",), limits, UID, (Mount(tmp_path / "gone", "/x"),)))
    with pytest.raises(Fatal, match=NOT_A_FOLDER[engine.name]):
        engine.start(Spec("worker", ("true",), limits, UID, (Mount(tmp_path, "/etc/passwd/x"),)))
    assert sandboxes(engine) == before


def sandboxes(engine: Engine) -> list[str]:
    """Control groups and containers of this process, and what it has on disk."""
    roots = [Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")]
    groups = [path.name for root in roots for path in root.glob(f"justgoal-{owners.mark()}-*")]
    folders = [str(path) for path in (owners.runtime_folder() / "owned").glob(f"{owners.mark()}/*")]
    containers: list[str] = []
    if engine.name == "docker":
        label = f"{daemon.OWNER}={owners.mark()}"
        with contextlib.closing(daemon.connect()) as client:
            containers = [one["Id"] for one in client.api.containers(all=True, filters={"label": label})]
    return sorted(groups + folders + containers)


def test_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"^bubblewrap is not installed: apt install bubblewrap$"):
        engines.choose("bubblewrap")


def top_of(version: int) -> Path:
    """Where control groups of that version are; those of version 2 may be beside those of version 1."""
    folder = {1: Path("/sys/fs/cgroup/freezer"), 2: Path("/sys/fs/cgroup/unified")}[version]
    if version == 2 and not folder.is_dir():
        folder = Path("/sys/fs/cgroup")
    if not (folder / "cgroup.procs").exists():
        pytest.skip(f"no control groups of version {version} here")
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.skipif(os.geteuid() != 0, reason="makes control groups")
def test_freezer_versions(version: int) -> None:
    """Freezing, thawing and removal of a group with frozen processes, in either version of control groups.

    The group is also found through its process, as that of a container is.
    """
    top = top_of(version)
    folder = top / f"test-{secrets.token_hex(4)}"
    group = cgroups.Group(version, {"memory": folder, "freezer": folder / "inside" if version == 2 else folder})
    for path in group.unique():
        path.mkdir()
    script = f"for g in {' '.join(group.joins)}; do echo 0 >$g; done; echo ready; exec sleep 1000"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        assert group.pids() == group.freezable() == {process.pid}
        tops = dict.fromkeys(("memory", "pids", "cpu", "freezer"), ("/", top))
        found = cgroups.Hierarchies(version, {}, tops).of_process(process.pid) if version == 2 else None
        assert found is None or found.folders["freezer"] == group.folders["freezer"]
        freezer = (found or group).freezer(process.pid)
        freezer.freeze()
        assert freezer.frozen()
        freezer.thaw()
        assert not freezer.frozen()
        freezer.freeze()
        group.remove()
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    freezer.freeze()  # what is gone can be told to freeze, and to thaw, at no one's cost
    freezer.thaw()
    assert not freezer.frozen()
    freezer.close()


def test_staged_tree(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    (tmp_path / "a" / "__pycache__").mkdir(parents=True, mode=0o700)
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("x")
    (tmp_path / "a" / "tool").write_text(token)
    (tmp_path / "a" / "tool").chmod(0o700)
    (tmp_path / "secret").symlink_to("/etc/passwd")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "text").write_text("text")
    (tmp_path / "text").chmod(0o600)
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        trees = list(pool.map(mounts.stage_tree, [tmp_path] * 8))
    assert len(set(trees)) == 1
    tree = trees[0]
    modes = {str(file.relative_to(tree)): oct(file.stat().st_mode & 0o7777) for file in tree.rglob("*")}
    assert modes == {"a": "0o755", "a/tool": "0o755", "text": "0o644"}
    assert not list(tree.parent.glob(".building-*"))
    assert token not in str(tree)


def test_owned_folder(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "run" / "workspace"
    mounts.own_folder(folder, UID)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    code = "open('made', 'w').write('x'); import os; print(os.getcwd())"
    assert printed(start(code, mounted=(Mount(folder, "/workspace", writable=True),))) == "/workspace\n"
    assert (folder / "made").stat().st_uid == UID


KEYRING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (248, 249, 250, 425):
    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of these calls are those of x86_64")
def test_keyrings_and_io_uring_are_refused(start: Start) -> None:
    assert printed(start(KEYRING)) == "-1 1\n" * 4


NAMESPACES = """
import ctypes, os, threading
libc = ctypes.CDLL(None, use_errno=True)
for name, number, *arguments in [
    ("unshare", 272, 0x10000000), ("clone", 56, 0x10000000 | 17), ("clone3", 435), ("setns", 308), ("mount", 165),
    ("fsopen", 430),
]:
    print(name, libc.syscall(number, *arguments, *[0] * (6 - len(arguments))), os.strerror(ctypes.get_errno()))
threading.Thread(target=print, args=["a thread"]).start()
if os.fork() == 0:
    os._exit(0)
print("a child", os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of these calls are those of x86_64")
def test_no_namespaces_inside(start: Start) -> None:
    """In a user namespace of its own a process would have every capability, and could mount without a limit."""
    refused = [f"{name} -1 Operation not permitted" for name in ("unshare", "clone", "setns", "mount", "fsopen")]
    refused.insert(2, "clone3 -1 Function not implemented")
    assert sorted(printed(start(NAMESPACES)).splitlines()) == sorted([*refused, "a thread", "a child 0"])


EVICTING = """
import os
file = os.open(os.__file__, os.O_RDONLY)
os.pread(file, 4096, 0)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
print(os.preadv(file, [bytearray(4096)], 0, os.RWF_NOWAIT))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of these calls are those of x86_64")
def test_files_are_not_evicted(start: Start) -> None:
    """All sandboxes share the page cache: which files are in it would be a message."""
    assert printed(start(EVICTING)) == "4096\n"
