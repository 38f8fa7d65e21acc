"""Whole runs: the command line, the real SDK against a scripted server, real sandboxes, the real judge.

The operator is tests/operators/scale_add. The user's Ctrl-C is sent as a terminal sends it: to the whole process group.
"""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import known
from messages_server import MessagesServer, Status, Stream, message, say, stream_of, text, use
from solutions import HONEST, SCALE_ADD, after, descendants, processes, sleeping

from justgoal import goal as goals
from justgoal import machine, owners, resources
from justgoal import run as module
from justgoal.errors import UsageError
from justgoal.evaluation.evaluator import threads
from justgoal.evaluation.verdict import Verdict
from justgoal.events import (
    Champion,
    Evaluation,
    EvaluationStarted,
    Event,
    Final,
    Goal,
    Paused,
    Request,
    Response,
    Resumed,
    RunStarted,
    Stopped,
    ToolCall,
    ToolResult,
)
from justgoal.sandboxes import UID, Engine
from justgoal.sandboxes.staging import neutral_folder
from justgoal.state import EXIT_CODES
from justgoal.tasks import contract
from justgoal.terminal import View
from justgoal.transcript import Transcript, read

PROGRAM = "from justgoal.cli import main; main()"
MODEL = "scripted-model"
TASK = contract.task(str(SCALE_ADD))
SOLUTION = "/workspace/solution/solution.py"
ABSENT = "there is no folder /workspace/solution yet: nothing was judged, and nothing counts"
WRONG = "def run(x, y, alpha):\n    return y, y.sum(1)\n"


def write(files: str, evaluate: str = "evaluate", path: str = SOLUTION) -> str:
    """A command that writes solution.py and has it judged."""
    return f"mkdir -p {Path(path).parent}\ncat > {path} <<'END'\n{files}\nEND\n{evaluate}"


def command(number: int, line: str, **more: Any) -> Stream:
    return say(text(f"Turn {number}."), use(f"toolu_{number}", command=line, **more), stop="tool_use")


@dataclass
class Process:
    """A justgoal process that was watched until it ended."""

    code: int
    out: str
    err: str
    peak: int
    """Kilobytes of resident memory that it reached."""
    maps: set[str]
    """Shared libraries that it had loaded."""
    started: dict[int, str] = field(default_factory=dict)
    """All processes below it, by number."""
    pid: int = 0


class Runner:
    """Starts `justgoal run` on scale_add in a folder of its own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine = engine
        self.runs = folder / "runs"
        self.folder = self.runs / "r"

    def start(self, server: MessagesServer | None, *options: str, **environment: str) -> subprocess.Popen[str]:
        words = ["run", str(SCALE_ADD), "--runs", str(self.runs), "--name", "r", "--engine", self.engine]
        if server is not None:
            words += ["--model", MODEL, "--base-url", server.url]
        variables = {**os.environ, "ANTHROPIC_API_KEY": "key", "NO_PROXY": "127.0.0.1", **environment}
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=variables, start_new_session=True,
        )  # fmt: skip

    def run(self, server: MessagesServer | None, *options: str, **environment: str) -> Process:
        return watch(self.start(server, *options, **environment))

    def events(self) -> list[Event]:
        return [record.event for record in read(self.folder / "events.jsonl", strict=True)]

    def written(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events() if isinstance(event, kind)]

    def verdicts(self) -> list[Any]:
        return [event.verdict for event in self.written(Evaluation)]

    def results(self) -> list[str]:
        return [event.content for event in self.written(ToolResult)]


@pytest.fixture
def runner(engine: Engine, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path, engine.name)
    yield runner
    for link in runner.runs.glob("*/workspace"):
        shutil.rmtree(link.readlink(), ignore_errors=True)


def watch(process: subprocess.Popen[str], until: Callable[[], bool] = lambda: False) -> Process:
    """Look at a process until it ends, or until the condition holds; then interrupt it as Ctrl-C would."""
    seen = Process(0, "", "", 0, set(), pid=process.pid)
    interrupted = False
    while True:
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            seen.peak = int(status.split("VmHWM:")[1].split()[0])
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            seen.maps |= set(re.findall(r"/([^/\n]+\.so[^/\n]*)", maps))
        # One that has ended and waits to be reaped has no command line any more.
        seen.started.update({pid: command for pid, command in descendants(process.pid).items() if command})
        if not interrupted and until():
            interrupted = True
            os.killpg(process.pid, signal.SIGINT)
        try:
            seen.out, seen.err = process.communicate(timeout=0.05)
            break
        except subprocess.TimeoutExpired:
            continue
    seen.code = process.returncode
    return seen


def left_behind(process: Process) -> list[str]:
    """Processes, control groups and folders of a run that has ended."""
    found = [f"{pid} {command}" for pid, _, command in processes() if command and process.started.get(pid) == command]
    return found + groups() + [str(path) for path in owned(process.pid)]


def owned(pid: int) -> list[Path]:
    """What the runtime of that number has on disk for as long as it lives."""
    return list((owners.runtime_folder() / "owned").glob(f"*-{pid}-*/*"))


def groups() -> list[str]:
    """Control groups of runtimes that have ended."""
    roots = [Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")]
    names = {path.name for root in roots if root.is_dir() for path in root.glob("justgoal-*-*")}
    return sorted(name for name in names if owners.dead(name.removeprefix("justgoal-").rpartition("-")[0]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def whole(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Whole"]:
    """Patience 2. No solution; expert; wrong; the first correct one resets; two repeated ones in a command of three."""
    runner = Runner(tmp_path_factory.mktemp("whole"), engine.name)
    script = [
        command(1, "evaluate; echo $?; evaluate --expert; evaluate nonsense; ls /task"),
        command(2, write(WRONG)),
        command(3, write(HONEST)),
        say(text("I am done.")),
        command(4, "evaluate; echo between; evaluate; echo never; evaluate"),
        command(5, "echo this is never asked for"),
    ]
    with MessagesServer(*script) as server:
        process = runner.run(server, "--patience", "2")
        yield runner, process, server
    shutil.rmtree((runner.folder / "workspace").readlink(), ignore_errors=True)


Whole = tuple[Runner, Process, MessagesServer]


@pytest.mark.docker("thorough")
def test_it_ends_by_the_rule(whole: Whole) -> None:
    runner, process, server = whole
    assert (process.code, process.err) == (0, "")
    assert len(server.seen) == 5
    kinds = [(v["number"], v["kind"], v["improved"], v["repeat_of"]) for v in runner.verdicts()]
    assert kinds == [
        (1, "wrong", False, None), (2, "correct", True, None), (3, "correct", False, 2), (4, "correct", False, 2),
    ]  # fmt: skip
    [stopped] = runner.written(Stopped)
    assert stopped == Stopped("patience", "2 evaluations in a row without an improvement")


def test_order_of_its_events(whole: Whole) -> None:
    """Every evaluation stands between a call and its result; the run ends inside the call that used the last one."""
    runner, _, _ = whole
    turn = [Request, Response]
    call = [ToolCall, ToolResult]
    judged = [EvaluationStarted, Evaluation]
    assert [type(event) for event in runner.events()] == [
        RunStarted, Goal,
        *turn, *call,
        *turn, ToolCall, *judged, ToolResult,
        *turn, ToolCall, *judged, Champion, ToolResult,
        *turn,
        *turn, ToolCall, *judged, *judged, ToolResult, Final, Stopped,
    ]  # fmt: skip


def test_what_the_model_was_told(whole: Whole) -> None:
    runner, _, server = whole
    first, wrong, correct, last = runner.results()
    sentence = r"expert \(eager\): \S+ [um]?s, error \S+ \(out\), \S+ \(total\)"
    assert re.fullmatch(
        rf"{re.escape(ABSENT)}\n2\n{sentence}\nusage: evaluate .*\n.*\nREADME.md\nexpert\ngoal.txt\ninputs.py\n"
        r"operator.toml\nreference.py\nworkload.json", first,
    ), first  # fmt: skip
    assert wrong.splitlines()[0].startswith("evaluation 1: wrong: output ")
    assert wrong.splitlines()[1:] == ["1 evaluation left without an improvement", "[exit code 1]"]
    figures = r"correct, \S+ [um]?s, \d+\.\d+x ± \S+ %"
    assert re.fullmatch(
        rf"evaluation 2: {figures}\nchampion\nexpert \(eager\) beside it: \S+ [um]?s\n"
        r"relative error: out \S+ \(allowed \S+\), total \S+ \(allowed \S+\)\n"
        r"2 evaluations left without an improvement", correct,
    ), correct  # fmt: skip
    assert re.match(rf"evaluation 3: {figures}\nthe same files as in evaluation 2: not measured again\n", last)
    assert "1 evaluation left without an improvement\nbetween" in last
    assert "never" not in last
    sent = [block for body in server.bodies for turn in body["messages"] for block in turn["content"]]
    assert {json.dumps(block["content"]) for block in sent if block["type"] == "tool_result"} == {
        json.dumps(content) for content in (first, wrong, correct)
    }
    assert all(set(body) == {"model", "max_tokens", "stream", "messages", "tools"} for body in server.bodies)


def test_goal_has_four_sentences(whole: Whole) -> None:
    runner, _, server = whole
    [goal] = runner.written(Goal)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": goal.text}]}]
    assert len(goal.text.splitlines()) == goals.sentences(goal.text) == 4
    assert "scale_add" in goal.text and "wide" in goal.text and " 2 evaluations" in goal.text


@pytest.mark.docker("thorough")
def test_what_is_printed(whole: Whole) -> None:
    runner, process, _ = whole
    clock = r"\[\d\d:\d\d:\d\d\]"
    figures = r"correct, \S+ [um]?s, \d+\.\d+x ± \S+ %"
    expected = rf"""justgoal run scale_add/wide with {MODEL}
  run folder   {re.escape(str(runner.folder))}
  sandbox      {runner.engine} \S+, uid 61000, no network
  check        1 of 1 planted errors are caught; allclose\(1e-2\) on one random input catches 0
  noise        gains from 1\.0 % are found here, calls from 1\.00 us \(certificate of \d\d:\d\d\)
  expert       eager \S+ [um]?s: eager is 1\.0x
  goal         en, 4 sentences, stops after 2 evaluations without an improvement

{clock} evaluation 1: wrong: output .*; 1 left
{clock} evaluation 2: {figures}, champion; 2 left
{clock} evaluation 3: {figures}, no improvement: the same files; 1 left
{clock} evaluation 4: {figures}, no improvement: the same files; 0 left
{clock} stopped: 2 evaluations in a row without an improvement
{clock} final: evaluation 2 judged afresh: correct, \d+\.\d+x ± \S+ % over the expert \(eager\)
{clock} justgoal show {re.escape(str(runner.folder))}
"""
    assert re.fullmatch(expected, process.out), process.out


def test_final_evaluation_is_another_one(whole: Whole) -> None:
    runner, _, _ = whole
    [final] = runner.written(Final)
    assert final.champion == 2
    judged, before = Verdict.from_json(final.verdict), Verdict.from_json(runner.verdicts()[1])
    assert judged.correct and judged.speedup and judged.resolution
    assert judged.speedup != before.speedup
    result = json.loads((runner.folder / "result.json").read_text())
    *_, last = read(runner.folder / "events.jsonl", strict=True)
    assert result == {
        "status": "patience", "detail": "2 evaluations in a row without an improvement", "evaluations": 4,
        "champion": 2, "final": final.verdict, "patience_ended_at": 4, "last_hash": last.hash,
    }  # fmt: skip


def test_run_folder(whole: Whole) -> None:
    runner, _, _ = whole
    folder = runner.folder
    assert names(folder) == [
        "champion", "events.jsonl", "result.json", "run.json", "solutions", "workspace",
    ]  # fmt: skip
    assert names(folder / "solutions") == ["1", "2", "3", "4"]
    assert (folder / "champion" / "solution.py").read_text() == HONEST + "\n"
    assert (folder / "solutions" / "1" / "solution.py").read_text() == WRONG + "\n"
    for started in runner.written(EvaluationStarted):
        assert list(started.files) == ["solution.py"]


@pytest.mark.docker("thorough")
def test_run_json(whole: Whole) -> None:
    """All that defines the run, and nothing about the host's names."""
    runner, _, _ = whole
    said = json.loads((runner.folder / "run.json").read_text())
    assert runner.written(RunStarted) == [RunStarted(said)]
    assert said["task"] == "scale_add/wide" and said["task_sha256"] == TASK.sha256
    assert (said["model"], said["own_server"], said["language"], said["patience"]) == (MODEL, True, "en", 2)
    assert (said["max_turns"], said["max_hours"]) == (None, None)
    assert set(said["prompts"]) == {path.name for path in resources.prompts().iterdir() if path.is_file()}
    assert said["cores"] == len(os.sched_getaffinity(0))
    for name in (
        "torch",
        "python",
        "kernel",
        "processor",
        "engine",
        "engine_version",
        "limits",
        "strength",
        "noise",
        "expert",
    ):
        assert said[name], name


@pytest.mark.parametrize("name", ["run.json", "events.jsonl", "result.json"])
def test_no_name_or_path_of_the_host(whole: Whole, name: str) -> None:
    runner, _, _ = whole
    text = (runner.folder / name).read_text()
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    for path in (runner.runs, Path(__file__).parents[1], Path.home(), neutral_folder(), sys.prefix, sys.base_prefix):
        assert str(path) not in text, path


def test_the_runtime_is_small(whole: Whole) -> None:
    _, process, _ = whole
    assert process.peak < 150_000
    assert [name for name in process.maps if "torch" in name or "_multiarray_umath" in name] == []


@pytest.mark.docker("thorough")
def test_nothing_is_left(whole: Whole) -> None:
    _, process, _ = whole
    assert any("justgoal.evaluation.service" in command for command in process.started.values())
    assert any("worker.py" in command for command in process.started.values())
    assert left_behind(process) == []
    assert not list((owners.runtime_folder() / "cpu" / "agents").glob(f"*-{process.pid}-*"))


def test_show(whole: Whole) -> None:
    runner, _, _ = whole
    done = subprocess.run([sys.executable, "-c", PROGRAM, "show", "r", "--runs", str(runner.runs)], text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"result +evaluation 2: \d+\.\d+x ± \S+ % over the expert \(eager\)", done.stdout)
    assert "patience: 2 evaluations in a row without an improvement" in done.stdout


def test_started_again_it_says_how_it_ended(whole: Whole) -> None:
    """Without a sandbox: there is no bubblewrap to be found."""
    runner, first, server = whole
    before = (runner.folder / "events.jsonl").read_bytes()
    done = runner.run(server, "--patience", "2", PATH="/nonexistent")
    assert (done.code, done.err) == (0, "")
    last = [line.split("] ")[-1] for line in first.out.splitlines() if "stopped:" in line or "final:" in line]
    assert [line for line in last if line not in done.out] == []
    assert (runner.folder / "events.jsonl").read_bytes() == before
    assert len(server.seen) == 5


@pytest.mark.slow
def test_played_again(whole: Whole, runner: Runner) -> None:
    """The recording's commands run again, its solutions are judged again; the rule is only told."""
    recording, _, _ = whole
    done = runner.run(None, "--model", f"recorded:{recording.folder}")
    assert (done.code, done.err) == (0, "")
    assert [(v["number"], v["kind"], v["repeat_of"]) for v in runner.verdicts()] == [
        (1, "wrong", None), (2, "correct", None), (3, "correct", 2), (4, "correct", 2), (5, "correct", 2),
    ]  # fmt: skip
    assert runner.written(Stopped)[0].status == "recording_ended"
    lines = [line.partition("] ")[2] for line in done.out.splitlines()[-4:]]
    assert re.fullmatch(r"stopped: all 5 responses of recorded:r have been played", lines[0])
    assert re.fullmatch(r"final: evaluation 2 judged afresh: correct, \S+x ± \S+ % over the expert \(eager\)", lines[1])
    assert lines[2:] == [
        "the patience rule of 2 would have ended it after evaluation 4", f"justgoal show {runner.folder}",
    ]  # fmt: skip
    said = json.loads((runner.folder / "run.json").read_text())
    assert (said["model"], said["patience"]) == ("recorded:r", 2)
    assert str(recording.runs) not in (runner.folder / "events.jsonl").read_text()
    assert "\n2 evaluations left without an improvement" in runner.results()[2]
    assert json.loads((runner.folder / "result.json").read_text())["patience_ended_at"] == 4
    again = runner.run(None, "--model", f"recorded:{recording.folder}", PATH="/nonexistent")
    assert again.code == 0
    assert lines[2] in again.out


# -------------------------------------------------------------------- other endings


@pytest.mark.slow
def test_without_a_correct_solution(runner: Runner) -> None:
    """In Chinese: invalid and wrong ones count, and there is no champion to judge afresh."""
    with MessagesServer(
        command(1, "mkdir /workspace/solution; evaluate; mkfifo /workspace/solution/solution.py; evaluate"),
        command(2, "rm /workspace/solution/solution.py\n" + write("import nothing", "evaluate; evaluate")),
    ) as server:
        done = runner.run(server, "--patience", "4", "--language", "zh")
    assert (done.code, done.err) == (0, "")
    assert [v["kind"] for v in runner.verdicts()] == ["invalid", "invalid", "build", "build"]
    assert [v["reason"] for v in runner.verdicts()[:2]] == [
        "it has no solution.py", "solution.py is a FIFO: only regular files and folders",
    ]  # fmt: skip
    assert runner.events()[-2:] == [
        Final(None, None), Stopped("patience", "4 evaluations in a row without an improvement"),
    ]  # fmt: skip
    [goal] = runner.written(Goal)
    assert goal.language == "zh"
    assert len(goal.text.splitlines()) == goals.sentences(goal.text) == 4
    assert "goal         zh, 4 sentences" in done.out
    assert "final: no solution was correct\n" in done.out
    assert json.loads((runner.folder / "result.json").read_text())["champion"] is None
    assert len(server.seen) == 2
    assert left_behind(done) == []


@pytest.mark.slow
def test_refusal(runner: Runner) -> None:
    refused = message(text("No."), stop="refusal", stop_details={"category": "cyber", "explanation": "kernels"})
    with MessagesServer(command(1, "true"), Stream(stream_of(refused))) as server:
        done = runner.run(server)
        again = runner.run(server, PATH="/nonexistent")
    assert (done.code, again.code) == (4, 4)
    assert runner.written(Stopped) == [Stopped("refused", "the model refused at turn 2 (cyber: kernels)")]
    assert "stopped: the model refused at turn 2 (cyber: kernels)" in done.out
    assert len(server.seen) == 2


@pytest.mark.slow
def test_max_turns(runner: Runner) -> None:
    with MessagesServer(command(1, "true"), command(2, "true"), command(3, "true")) as server:
        done = runner.run(server, "--max-turns", "2")
    assert done.code == 0
    assert runner.written(Stopped) == [Stopped("max_turns", "2 turns used")]
    assert len(server.seen) == 2
    assert json.loads((runner.folder / "run.json").read_text())["max_turns"] == 2


@pytest.mark.slow
def test_no_time_at_all(runner: Runner) -> None:
    with MessagesServer(command(1, "true")) as server:
        done = runner.run(server, "--max-hours", "0")
        assert server.seen == []
    assert done.code == 0
    assert runner.written(Stopped)[0].status == "max_hours"


@pytest.mark.thorough
@pytest.mark.slow
def test_key_is_not_accepted(runner: Runner) -> None:
    """Paused: with a key that is accepted the same command goes on."""
    with MessagesServer(Status(401, "authentication_error", "invalid x-api-key"), command(1, "true")) as server:
        done = runner.run(server, "--max-turns", "1")
        assert done.code == 3
        assert "paused: the model's server does not accept the API key (401, " in done.out
        assert "; start the same command with one that it accepts\n" in done.out
        assert runner.run(server, "--max-turns", "1").code == 0


# -------------------------------------------------------------------- interrupted and gone on with


@pytest.mark.slow
def test_interrupted_while_judging(runner: Runner) -> None:
    """Ctrl-C: paused, exit 3, nothing left. The same command judges it again under the same number, and goes on."""
    with MessagesServer(command(1, write(WRONG)), command(2, "cat solution/solution.py")) as server:
        done = watch(runner.start(server, "--max-turns", "2"), lambda: judging(runner))
        assert (done.code, done.err) == (3, "")
        assert [type(event) for event in runner.events()][-2:] == [EvaluationStarted, Paused]
        assert "] paused: interrupted by the user\n" in done.out
        assert "] the same command goes on with this run\n" in done.out
        assert left_behind(done) == []
        again = runner.run(server, "--max-turns", "2")
    assert (again.code, again.err) == (0, "")
    events = [type(event) for event in runner.events()]
    assert events[events.index(Resumed) : events.index(Resumed) + 5] == [
        Resumed, Evaluation, ToolResult, Request, Response,
    ]  # fmt: skip
    assert [(v["number"], v["kind"]) for v in runner.verdicts()] == [(1, "wrong")]
    interrupted = runner.written(ToolResult)[0]
    assert interrupted.is_error
    assert interrupted.content.startswith("interrupted: ")
    assert f"evaluation 1: {Verdict.from_json(runner.verdicts()[0]).sentence()}" in interrupted.content
    assert runner.results()[1].splitlines() == WRONG.splitlines()
    assert len(server.seen) == 2


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_keeps_its_rule(runner: Runner, tmp_path: Path) -> None:
    """Gone on with under another certificate, it judges, and tells the model, by the one that it began with."""
    look = "grep -o 'in each of . pairs' /task/README.md"
    with MessagesServer(command(1, look), Status(401, "authentication_error", "no"), command(2, look)) as server:
        first = known(tmp_path / "first", pairs=3)
        assert runner.run(server, "--max-turns", "2", XDG_CACHE_HOME=first).code == 3
        again = runner.run(server, "--max-turns", "2", XDG_CACHE_HOME=known(tmp_path / "second", pairs=6))
    assert (again.code, again.err) == (0, "")
    assert json.loads((runner.folder / "run.json").read_text())["noise"]["pairs"] == 3
    assert runner.results() == ["in each of 3 pairs"] * 2


def judging(runner: Runner) -> bool:
    """Whether an evaluation is under way, by the transcript."""
    path = runner.folder / "events.jsonl"
    kinds = [type(record.event) for record in read(path)] if path.exists() else []
    return kinds.count(EvaluationStarted) > kinds.count(Evaluation)


def waiting(runner: Runner, kind: type[Event]) -> Callable[[], bool]:
    def reached() -> bool:
        path = runner.folder / "events.jsonl"
        events = [record.event for record in read(path)] if path.exists() else []
        if not events or not isinstance(events[-1], kind):
            return False
        time.sleep(0.5)
        return True

    return reached


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Request, ToolCall], ids=["model is thinking", "running a command"])
def test_interrupted(runner: Runner, kind: type[Event]) -> None:
    silent = Stream(stream_of(message(text("I am"), stop="end_turn"))[:3], ending="silence")
    slow = command(1, "echo begun; sleep 1000")
    with MessagesServer(silent if kind is Request else slow, command(2, "echo on")) as server:
        done = watch(runner.start(server, "--max-turns", "2"), waiting(runner, kind))
        assert (done.code, done.err) == (3, "")
        assert runner.written(Paused) == [Paused("interrupted by the user")]
        assert left_behind(done) == []
        again = runner.run(server, "--max-turns", "2")
    assert again.code == 0
    assert runner.results()[-1] == "on"
    assert runner.written(Stopped)[0].status == "max_turns"


@pytest.mark.slow
def test_interrupted_in_the_final_evaluation(runner: Runner) -> None:
    """No further request: the same command judges the champion afresh once more, and that is the end."""

    def final() -> bool:
        path = runner.folder / "events.jsonl"
        kinds = [type(record.event) for record in read(path)] if path.exists() else []
        if kinds.count(Evaluation) < 2 or kinds[-1] is not ToolResult:
            return False
        time.sleep(2.0)  # the agent's sandbox is closed first
        return True

    with MessagesServer(command(1, write(HONEST, "evaluate; evaluate"))) as server:
        done = watch(runner.start(server, "--patience", "1"), final)
        assert (done.code, done.err) == (3, "")
        assert runner.written(Paused) == [Paused("interrupted during the final evaluation")]
        assert left_behind(done) == []
        again = runner.run(server, "--patience", "1")
        assert len(server.seen) == 1
    assert (again.code, again.err) == (0, "")
    assert [type(event) for event in runner.events()][-4:] == [Paused, Resumed, Final, Stopped]
    assert runner.written(Final)[0].champion == 1


@pytest.mark.slow
@pytest.mark.docker("thorough")
def test_killed_while_judging(runner: Runner) -> None:
    """kill -9 of the runtime alone: the same command finds the champion, the count and the evaluation in flight."""
    script = [command(1, write(HONEST)), command(2, write(sleeping(0.03))), command(3, write(WRONG))]
    with MessagesServer(*script) as server:
        process = runner.start(server, "--patience", "2")
        started: dict[int, str] = {}
        while process.poll() is None:
            started.update(descendants(process.pid))
            if len(runner_verdicts(runner)) == 1 and judging(runner):
                time.sleep(1.0)
                process.kill()
            time.sleep(0.05)
        process.communicate()
        killed = Process(-9, "", "", 0, set(), started, process.pid)
        assert [type(event) for event in runner.events()][-1] is EvaluationStarted
        again = runner.run(server, "--patience", "2")
    assert (again.code, again.err) == (0, "")
    assert left_behind(again) == left_behind(killed) == []
    assert [(v["number"], v["kind"], v["improved"]) for v in runner.verdicts()] == [
        (1, "correct", True), (2, "correct", False), (3, "wrong", False),
    ]  # fmt: skip
    assert runner.verdicts()[1]["ratios"][0] < 1
    assert runner.written(Stopped)[0].status == "patience"
    assert runner.written(Final)[0].champion == 1


def runner_verdicts(runner: Runner) -> list[Any]:
    with suppress(Exception):
        return [r.event for r in read(runner.folder / "events.jsonl") if isinstance(r.event, Evaluation)]
    return []


@pytest.mark.slow
def test_a_lost_judge_pauses_the_run(runner: Runner) -> None:
    """Nobody's solution is to blame: nothing counts, and the same command goes on."""
    with MessagesServer(command(1, "sleep 3; " + write(WRONG)), command(2, "true")) as server:
        process = runner.start(server, "--max-turns", "1")
        done = False
        while process.poll() is None:
            events = [r.event for r in read(runner.folder / "events.jsonl")] if runner.folder.exists() else []
            if not done and any(isinstance(event, ToolCall) for event in events):
                done = True
                for pid, line in descendants(process.pid).items():
                    if line.startswith("/opt/venv/bin/python") and "justgoal.evaluation.service" in line:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        _, err = process.communicate()
        assert (process.returncode, err) == (3, "")
        assert runner.written(Paused)[0].reason.startswith("the judge")
        again = runner.run(server, "--max-turns", "1")
    assert again.code == 0
    assert [v["number"] for v in runner.verdicts()] == [1]


@pytest.mark.slow
def test_a_command_cannot_hold_the_run(runner: Runner) -> None:
    """Whatever it does to the gate, a command's deadline comes."""
    knock = """python -c "
import socket, time
end, kept = time.time() + 30, []
while time.time() < end:
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].connect('/run/justgoal/evaluate.sock')
" """
    with MessagesServer(command(1, knock, timeout=3), command(2, "true")) as server:
        done = runner.run(server, "--max-turns", "1")
    assert done.code == 0
    [result] = runner.results()
    assert result.endswith("[stopped after 3 seconds: the processes that this command started were killed]")


# -------------------------------------------------------------------- run folders that are no such run, or over


def description(**changes: Any) -> dict[str, Any]:
    goal = goals.render(resources.prompts(), "en", operator="scale_add", workload="wide", device="cpu", patience=20)
    return {"format": module.FORMAT, "processor": machine.processor()[0], "cores": threads(), "task": TASK.name,
            "engine": "bubblewrap", "task_sha256": TASK.sha256, "model": MODEL, "goal": goal.sha256, "language": "en",
            "uid": UID, "patience": 20, **changes}  # fmt: skip


def recorded(folder: Path, *events: Event, **changes: Any) -> None:
    folder.mkdir(parents=True)
    transcript = Transcript.open(folder / "events.jsonl")
    for event in (RunStarted(description(**changes)), *events):
        transcript.write(event)
    transcript.close()


CORRECT = Verdict("correct", latency=1e-3, expert_latency=2e-3, expert="eager", speedup=2.75, resolution=0.007,
                  improved=True, number=1)  # fmt: skip


URL = "http://127.0.0.1:9"


@pytest.fixture
def start(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """A run in this very process, where bubblewrap cannot be found: its exit code and what it prints."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key")
    monkeypatch.setenv("PATH", "/nonexistent")

    def run(name: str | None = "r", **changes: Any) -> tuple[int, str]:
        options = module.RunOptions(MODEL, str(SCALE_ADD), name, runner.runs, URL, "en", None, None, None, "bubblewrap")
        options = dataclasses.replace(options, **changes)
        stream = io.StringIO()
        return module.run(options, View(stream)), stream.getvalue()

    return run


Start = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("format", 0),
        ("task", "scale_add/odd"),
        ("task_sha256", "0" * 64),
        ("model", "another"),
        ("goal", "1" * 64),
        ("processor", "Another CPU"),
        ("cores", 1000),
        ("engine", "docker"),
    ],
)
def test_run_of_something_else(runner: Runner, start: Start, field_name: str, value: Any) -> None:
    recorded(runner.folder, **{field_name: value})
    before = {path: path.read_bytes() for path in runner.folder.iterdir()}
    wanted = description()[field_name]
    text = f"{runner.folder} is a run with {field_name} {value!r}, not {wanted!r}: give another --name"
    with pytest.raises(UsageError, match=f"^{re.escape(text)}$"):
        start()
    assert {path: path.read_bytes() for path in runner.folder.iterdir()} == before


@pytest.mark.parametrize("status", [status for status in EXIT_CODES if status != "interrupted"])
def test_finished_runs(runner: Runner, start: Start, status: str) -> None:
    """How it ended, and with that exit code, without a sandbox."""
    judged = [Evaluation(1, CORRECT.to_json()), Champion(1, 2.75)]
    recorded(runner.folder, *judged, Final(CORRECT.to_json(), 1), Stopped(status, "because"))
    code, printed = start()
    assert code == EXIT_CODES[status]
    assert "stopped: because\n" in printed
    assert "final: evaluation 1 judged afresh: correct, 2.75x ± 0.7 % over the expert (eager)\n" in printed
    assert printed.splitlines()[-1].endswith(f"justgoal show {runner.folder}")


def test_a_folder_that_is_no_run(runner: Runner, start: Start) -> None:
    runner.folder.mkdir(parents=True)
    (runner.folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=f"^{runner.folder} exists and is no run: give another --name$"):
        start()
    assert names(runner.folder) == ["notes.txt"]


@pytest.mark.parametrize("place", ["", "events.jsonl"])
def test_what_is_no_run_is_left_alone(runner: Runner, start: Start, place: str) -> None:
    """A file where the folder should be, a folder where the transcript should be."""
    if place:
        (runner.folder / place).mkdir(parents=True)
    else:
        runner.runs.mkdir()
        runner.folder.write_text("mine")
    with pytest.raises(UsageError, match=f"^{runner.folder} exists and is no run: give another --name$"):
        start()


def test_hours_without_end(runner: Runner, start: Start) -> None:
    with pytest.raises(UsageError, match=r"^--max-hours inf is no number of hours$"):
        start(max_hours=math.inf)
    assert not runner.runs.exists()


def test_a_recording_of_another_task(runner: Runner, start: Start) -> None:
    recorded(runner.runs / "other", task="top_k_select/b8_n32768")
    text = "recorded:other is a run of top_k_select/b8_n32768, not of scale_add/wide"
    with pytest.raises(UsageError, match=f"^{re.escape(text)}$"):
        start(model="recorded:other", base_url=None)
    assert names(runner.runs) == ["other"]


def test_an_operator_for_another_device(runner: Runner, start: Start, tmp_path: Path) -> None:
    folder = shutil.copytree(SCALE_ADD, tmp_path / "scale_add")
    toml = folder / "operator.toml"
    toml.write_text(toml.read_text().replace('devices = ["cpu"]', 'devices = ["cuda"]'))
    with pytest.raises(UsageError, match=r"^scale_add/wide is not for cpu: its operator names cuda$"):
        start(task=str(folder))
    assert not runner.runs.exists()


def test_a_run_that_was_killed_before_its_first_line(runner: Runner, start: Start) -> None:
    """Its folder has an empty transcript: there is no run yet, and the same command may start it."""
    runner.folder.mkdir(parents=True)
    (runner.folder / "events.jsonl").touch()
    with pytest.raises(UsageError, match="bubblewrap"):
        start()


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b", "-x", "\u202ex"])
def test_names(runner: Runner, start: Start, name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        start(name)
    assert not runner.runs.exists()


def test_no_bubblewrap(runner: Runner, start: Start) -> None:
    with pytest.raises(UsageError, match=r"^bubblewrap is not installed: apt install bubblewrap$"):
        start()
    assert not runner.runs.exists()


TOO_SHORT = (
    r"error: scale_add/wide is too short for this machine: its expert takes \S+ [um]?s, and calls can be told apart"
    r" from 3\.00 s \(justgoal doctor\)\n"
)


@pytest.mark.slow
def test_a_task_that_is_too_short(runner: Runner, tmp_path: Path) -> None:
    with MessagesServer() as server:
        done = runner.run(server, XDG_CACHE_HOME=known(tmp_path / "cache", shortest_latency=3.0))
    assert done.code == 2
    assert re.fullmatch(TOO_SHORT, done.err), done.err
    assert not runner.runs.exists()
    assert left_behind(done) == []


# -------------------------------------------------------------------- justgoal evaluate


def evaluate(*words: str) -> Process:
    return watch(subprocess.Popen([sys.executable, "-c", PROGRAM, "evaluate", *words], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))  # fmt: skip


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "it has no solution.py"),
        ({"solution.py": "x = 1\n"}, "solution.py defines no function run"),
        ({"solution.py": None}, "solution.py is a link: only regular files and folders"),
    ],
    ids=["empty", "no run", "link"],
)
def test_evaluate_no_solution(tmp_path: Path, files: dict[str, str | None], problem: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in files.items():
        if content is None:
            (folder / name).symlink_to("/etc/passwd")
        else:
            (folder / name).write_text(content)
    done = evaluate(str(folder), "--task", str(SCALE_ADD))
    assert (done.code, done.out, done.err) == (2, "", f"error: {folder} is no solution: {problem}\n")


def test_evaluate_is_no_folder(tmp_path: Path) -> None:
    done = evaluate(str(tmp_path / "none"), "--task", str(SCALE_ADD))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {tmp_path / 'none'} is no solution: there is no folder none\n"


@pytest.mark.slow
@pytest.mark.docker("thorough")
def test_evaluate(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text(HONEST)
    done = evaluate(str(tmp_path), "--task", f"{SCALE_ADD}/odd", "--engine", engine.name)
    assert (done.code, done.err) == (0, "")
    noise, expert, verdict = done.out.splitlines()
    assert re.fullmatch(
        r"noise        gains from 1\.0 % are found here, calls from 1\.00 us \(certificate of \d\d:\d\d\)", noise
    )
    assert re.fullmatch(r"expert       eager \S+ [um]?s: eager is 1\.0x", expert)
    assert re.fullmatch(r"correct, \S+ [um]?s, \S+x ± \S+ % over the expert", verdict)
    assert left_behind(done) == []


@pytest.mark.slow
def test_evaluate_what_is_too_short(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "solution.py").write_text(HONEST)
    monkeypatch.setenv("XDG_CACHE_HOME", known(tmp_path / "cache", shortest_latency=3.0))
    done = evaluate(str(tmp_path), "--task", str(SCALE_ADD))
    assert done.code == 2
    assert re.fullmatch(TOO_SHORT, done.err), done.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_evaluate_is_ended(engine: Engine, tmp_path: Path, number: signal.Signals) -> None:
    """Where a solution keeps its process busy, that one too is gone with the command."""
    (tmp_path / "solution.py").write_text("while True:\n    pass\n\ndef run(*arguments):\n    pass\n")
    words = ["evaluate", str(tmp_path), "--task", str(SCALE_ADD), "--engine", engine.name]
    found: dict[int, str] = {}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 100
            while sum("python /opt/justgoal/worker.py" in one for one in found.values()) < 3:  # blank, expert, and this
                assert time.monotonic() < deadline
                time.sleep(0.05)
                found = {pid: one for pid, one in descendants(process.pid).items() if not one.startswith("bwrap")}
            process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert [one for pid, _, one in processes() if one and found.get(pid) == one] == []
    assert groups() + owned(process.pid) == []


@pytest.mark.slow
def test_evaluate_as_json(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text(after(0, "total = total + 1"))
    done = evaluate(str(tmp_path), "--task", str(SCALE_ADD), "--json", "--engine", engine.name)
    assert (done.code, done.err) == (1, "")
    said = json.loads(done.out)
    assert set(said) == {"task", "noise", "expert", "verdict"}
    assert said["task"] == "scale_add/wide"
    assert Verdict.from_json(said["verdict"]).sentence().startswith("wrong: output 1 (total): ")
