"""`justgoal doctor`: is a run possible here, how well will it measure, and what is to be done about what is not so.

Each check says what it found in one line. "missing" ends the hope of a run here, "weak" only makes it worth less.
"""

import json
import os
import platform
import pwd
import select
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from justgoal import __version__, figures, machine
from justgoal.errors import JustgoalError
from justgoal.evaluation import certificate
from justgoal.evaluation.certificate import Certificate
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import CACHE, PYTHON, compute_environment, memory, threads
from justgoal.sandboxes import JUDGE_UID, UID, Engine, Limits, Spec
from justgoal.sandboxes.bubblewrap import Bubblewrap
from justgoal.sandboxes.docker import Docker
from justgoal.terminal import View

DEVICE = "cpu"
ENGINES = (Docker, Bubblewrap)
"""The default comes first."""
MARGIN = " " * 20
"""Where findings begin; what to do stands below them."""

WEAK_GAIN = 0.05
WEAK_LATENCY = 0.002
WEAK_CLOCK = 1e-6
WEAK_FREEZE = 0.002
ENOUGH_DISK, LITTLE_DISK = 5 << 30, 1 << 30
"""A run keeps every solution and the agent's workspace: bytes that one may need, and that it cannot begin without."""

INSIDE = """
import json, os, shutil, subprocess, sysconfig
compiler = shutil.which("c++")
said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if compiler else ""
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps({"compiler": said.partition(chr(10))[0], "headers": headers, "uid": os.getuid()}))
"""
GREEDY = "bytearray(256 << 20)"
SLEEPING = "import time; time.sleep(60)"
COMPILING = """
import torch
print(torch.compile(lambda x: torch.sin(x) + 1)(torch.zeros(64)).sum().item())
"""


@dataclass(frozen=True)
class Line:
    """One check; `remedy` says what to do where the mark is not "ok"."""

    mark: Literal["ok", "weak", "missing"]
    name: str
    finding: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.mark:<9}{self.name:<11}{self.finding}"
        return f"{text}\n{MARGIN}{self.remedy}" if self.remedy else text


def doctor(view: View, runs: Path, *, quick: bool, as_json: bool) -> int:
    """Print every check as it is made; exit code 0 when a run is possible here, 2 when not."""
    lines = []
    with view:
        if not as_json:
            view.header([f"justgoal {__version__}", ""])
        for line in checks(view, runs, quick):
            lines.append(line)
            if not as_json:
                view.header([str(line)])
    possible = all(line.mark != "missing" for line in lines)
    if as_json:
        held = certificate.stored(DEVICE)
        report = {"justgoal": __version__, "possible": possible, "checks": [asdict(line) for line in lines],
                  "noise": held.to_json() if held else None}  # fmt: skip
        print(json.dumps(report, indent=1))
    else:
        view.header(["", f"a run is {'possible' if possible else 'not possible'} here"])
    return 0 if possible else 2


def checks(view: View, runs: Path, quick: bool) -> Iterator[Line]:
    """The lines in order. Without an engine there is nothing to try the rest in."""
    with ExitStack() as stack:
        found, tried = engines(stack)
        yield from tried
        yield uid()
        yield processor()
        yield clock()
        yield disk(runs)
        if not found:
            return
        try:
            yield from sandboxed(found[0], view, quick)
        except JustgoalError as error:
            yield Line(
                "missing", "sandbox", str(error), "run as root where the kernel allows namespaces and control groups"
            )


def sandboxed(engine: Engine, view: View, quick: bool) -> Iterator[Line]:
    """What can only be tried in a sandbox."""
    yield freezer(engine)
    yield limits(engine)
    yield from tools(engine)
    if quick:
        held = certificate.stored(DEVICE)
    else:
        view.status("waiting for the device")
        with Device(DEVICE).exclusive():
            view.status("compiling")
            yield compiling(engine)
            view.status("measuring the noise of this machine: about a minute")
            held = certificate.current(engine, DEVICE)
    if held:
        yield from noise(held)


def engines(stack: ExitStack) -> tuple[list[Engine], list[Line]]:
    """Those that work, and a line for each: one that does not is no loss beside one that does."""
    found: list[Engine] = []
    failures: dict[str, str] = {}
    for kind in ENGINES:
        try:
            found.append(stack.enter_context(closing(kind())))
        except JustgoalError as error:
            failures[kind.name] = str(error)
    working = [Line("ok", "engine", f"{engine.name} {engine.version}") for engine in found]
    mark: Literal["weak", "missing"] = "weak" if found else "missing"
    broken = [Line(mark, "engine", *_cause_and_cure(text)) for text in failures.values()]
    return found, [*working, *broken]


def uid() -> Line:
    """Sandboxes run as users that nobody else may be, or as the one who starts them."""
    if os.geteuid() != 0:
        return Line("ok", "uid", f"{UID} here and in sandboxes")
    taken = [f"{number} is {name}" for number in (UID, JUDGE_UID) if (name := _user(number))]
    if taken:
        return Line("weak", "uid", f"sandboxes share an account of this machine: uid {', '.join(taken)}",
                    "give that account another uid: it could read what sandboxes write")  # fmt: skip
    return Line("ok", "uid", f"{os.geteuid()} here, {UID} in sandboxes, {JUDGE_UID} for the judge")


def processor() -> Line:
    """The device of this version."""
    model, features = machine.processor()
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    finding = f"cpu: {model}, {figures.amount(threads(), 'core')}, {size} GB, {', '.join(features) or 'no AVX'}"
    if threads() == 1:
        return Line(
            "weak", "device", finding, "use a machine with two cores or more: the judge needs one beside a solution"
        )
    return Line("ok", "device", finding)


def clock() -> Line:
    """What the judge reads at both ends of a window."""
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else platform.system()
    takes = []
    for _ in range(1000):
        begun = time.perf_counter_ns()
        takes.append((time.perf_counter_ns() - begun) * 1e-9)
    finding = f"{name}, read in {round(statistics.median(takes) * 1e9)} ns"
    if statistics.median(takes) > WEAK_CLOCK:
        return Line("weak", "clock", finding, "boot with clocksource=tsc, or kvm-clock in a virtual machine")
    return Line("ok", "clock", finding)


def disk(runs: Path) -> Line:
    """Room where runs are written."""
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    finding = f"{free / 2**30:.1f} GB free where runs are written"
    if free < ENOUGH_DISK:
        mark: Literal["weak", "missing"] = "missing" if free < LITTLE_DISK else "weak"
        return Line(mark, "disk", finding, f"make room for {ENOUGH_DISK >> 30} GB, or write elsewhere: --runs DIR")
    return Line("ok", "disk", finding)


def freezer(engine: Engine) -> Line:
    """Whatever is not being timed stands still: how soon."""
    takes = []
    with closing(engine.start(_spec(SLEEPING))) as sandbox:
        for _ in range(20):
            begun = time.perf_counter()
            sandbox.freezer.freeze()
            takes.append(time.perf_counter() - begun)
            sandbox.freezer.thaw()
        kind = sandbox.freezer.kind
    median = statistics.median(takes)
    finding = f"{kind}, frozen in {figures.latency(median)}"
    if median > WEAK_FREEZE:
        return Line("weak", "freezer", finding, "end what else runs here")
    return Line("ok", "freezer", finding)


def limits(engine: Engine) -> Line:
    """A sandbox that wants more memory than it may have is ended, and it is known why."""
    if not engine.limited:
        return Line("weak", "limits", "of each process, not of a sandbox as a whole",
                    "run as root, or as a user whom systemd gives control groups: loginctl enable-linger")  # fmt: skip
    spec = _spec(GREEDY, memory=64 << 20)
    with closing(engine.start(spec)) as sandbox:
        sandbox.exit_status(10.0)
        killed = sandbox.memory_kills() > 0
    if killed:
        return Line("ok", "limits", "memory, processes and processor time of every sandbox")
    return Line("weak", "limits", f"a sandbox got more than its {spec.limits.memory >> 20} MB",
                "let control groups limit memory: cgroup_enable=memory at boot")  # fmt: skip


def tools(engine: Engine) -> Iterator[Line]:
    """What a solution finds in its sandbox."""
    code, printed = _python(engine, INSIDE, 30.0)
    if code != 0:
        yield Line("missing", "sandbox", f"Python does not run in it: {printed or f'exit status {code}'}",
                   "install Python where every user may read it")  # fmt: skip
        return
    found = json.loads(printed)
    yield (
        Line("ok", "compiler", found["compiler"])
        if found["compiler"]
        else Line("weak", "compiler", "there is no c++: no solution can be compiled", "apt install g++")
    )
    name = f"Python {platform.python_version()}"
    yield (
        Line("ok", "headers", f"Python.h of {name}")
        if found["headers"]
        else Line(
            "weak", "headers", f"there is no Python.h of {name}: torch.compile cannot build", "apt install python3-dev"
        )
    )


def compiling(engine: Engine) -> Line:
    """Many experts are compiled by torch; those that cannot be do not count."""
    begun = time.monotonic()
    code, printed = _python(engine, COMPILING, 120.0)
    if code == 0:
        return Line("ok", "compile", f"torch.compile works, in {figures.latency(time.monotonic() - begun)}")
    why = printed or ("it had not ended after 120 s" if code is None else f"exit status {code}")
    return Line("weak", "compile", f"torch.compile does not work: {why}",
                "install g++ and python3-dev; until then the experts that need it do not count")  # fmt: skip


def noise(held: Certificate) -> Iterator[Line]:
    """What can be told apart, by the certificate of the device."""
    again = f"end what else runs here, remove {certificate.file(held.device)} and try again"
    spread, bias = figures.percent(held.spread), figures.percent(held.bias)
    yield Line("ok", "noise", f"{held.device}: the same solution differs by {spread} from itself (pair bias {bias})")
    rule = f"when {held.pairs} pairs of processes all say more than {figures.percent(held.minimum_gain)}"
    finding = f"found from {figures.percent(held.smallest_gain)}, {rule}"
    weak = held.smallest_gain > WEAK_GAIN
    yield Line("weak" if weak else "ok", "gains", finding, again if weak else "")
    error = figures.latency(held.clock_error)
    finding = f"compared from {figures.latency(held.shortest_latency)}: the clock is right within {error}"
    weak = held.shortest_latency > WEAK_LATENCY
    yield Line("weak" if weak else "ok", "calls", finding, again if weak else "")


def _cause_and_cure(error: str) -> tuple[str, str]:
    """The two halves of an error's line."""
    cause, _, cure = error.partition(": ")
    return cause, cure


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return ""


def _spec(program: str, memory: int = 1 << 30) -> Spec:
    return Spec("doctor", (PYTHON, "-c", program), Limits(memory, 1024, threads()), UID, tmpfs={"/solution": 1 << 30},
                environment={**compute_environment(), "XDG_CACHE_HOME": CACHE,
                             "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/inductor"})  # fmt: skip


def _python(engine: Engine, program: str, limit: float) -> tuple[int | None, str]:
    """Exit code of a program in a sandbox like a build's, None when it took too long; and the last line it printed."""
    printed = b""
    end = time.monotonic() + limit
    with closing(engine.start(_spec(program, memory(8)))) as sandbox:
        while time.monotonic() < end and select.select([sandbox.output], [], [], end - time.monotonic())[0]:
            data = os.read(sandbox.output, 1 << 16)
            if not data:
                break
            printed += data
        code = sandbox.exit_status(max(0.0, end - time.monotonic()))
    lines = printed.decode(errors="replace").strip().splitlines()
    return code, lines[-1] if lines else ""
