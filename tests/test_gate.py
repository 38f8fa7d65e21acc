"""Where `evaluate` arrives: requests, words, numbers, and what is written down. What needs a judge is in test_run.py.

Nothing here is ever judged: solutions are invalid, or are answered from the record.
"""

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from solutions import HONEST, solution

from justgoal import owners
from justgoal.errors import StopRun
from justgoal.evaluation import device as devices
from justgoal.evaluation.collect import Solution
from justgoal.evaluation.device import Device
from justgoal.evaluation.gate import ABSENT, USAGE, Court, Gate
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.events import Champion, Evaluation, EvaluationStarted, Event
from justgoal.state import State
from justgoal.stopping import Patience
from justgoal.transcript import Record, Transcript, read

REPORT = ExpertReport({"eager": 2e-3, "slow": 4e-3}, {"eager": {"out": 3.3e-8, "total": 1.14e-7}}, "eager", (1.0, 1.01))
FIRST = solution(HONEST)
OTHER = solution(HONEST + "# another\n")
CORRECT = Verdict("correct", latency=1e-3, expert_latency=2e-3, expert="eager", speedup=2.0, resolution=0.01,
                  improved=True, errors={"out": (3.3e-8, 1.1e-7), "total": (0.0, 2.5e-8)})  # fmt: skip
WRONG = Verdict("wrong", "output 1 (total): relative error is 4.1x the allowed error, on 3 of 4 inputs")


class Run:
    """A run folder with a gate, and a client at it."""

    def __init__(self, folder: Path, patience: int) -> None:
        self.folder = folder / "run"
        self.solution = self.folder / "workspace" / "solution"
        self.solution.parent.mkdir(parents=True)
        self.state = State()
        self.seen: list[Record] = []
        self.transcript = Transcript.open(self.folder / "events.jsonl", self.state.apply)
        self.transcript.watch(self.seen.append)
        self.phases: list[str] = []
        self.court = Court(self.folder, None, Device("cpu"), self.transcript, self.state)  # type: ignore[arg-type]
        self.gate = Gate(self.court, self.state, Patience(patience), REPORT, os.geteuid(), self.phases.append)

    def write(self, files: Solution) -> None:
        files.write(self.solution)

    def recorded(self, number: int, files: Solution, verdict: Verdict) -> None:
        """As if this had been judged."""
        value = {**verdict.to_json(), "number": number, "solution": files.sha256}
        self.transcript.write(EvaluationStarted(number, files.sha256, files.files))
        self.transcript.write(Evaluation(number, value))
        if verdict.improved:
            self.transcript.write(Champion(number, 2.0))

    def send(self, request: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.gate.folder / "evaluate.sock"))
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            self.gate.serve()
            return client.makefile("rb").read()

    def ask(self, *arguments: str) -> tuple[list[str], int]:
        """What `evaluate` with these arguments prints, line by line, and its exit code."""
        answer = json.loads(self.send(json.dumps({"arguments": arguments}).encode() + b"\n"))
        assert set(answer) == {"text", "code"}
        return answer["text"].splitlines(), answer["code"]

    def events(self) -> list[Event]:
        return [record.event for record in read(self.folder / "events.jsonl", strict=True)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    host = Path(tempfile.mkdtemp())  # the path of a socket is at most 107 bytes long
    for module in (devices, owners):
        monkeypatch.setattr(module, "runtime_folder", lambda: host)
    started = []

    def run(patience: int = 20) -> Run:
        started.append(Run(tmp_path, patience))
        return started[-1]

    yield run
    for one in started:
        one.gate.close()
        one.transcript.close()
    shutil.rmtree(host)


def test_expert(start: Callable[..., Run]) -> None:
    run = start()
    assert run.ask("--expert") == (["expert (eager): 2.00 ms, error 3.3e-08 (out), 1.1e-07 (total)"], 0)
    assert run.events() == []


@pytest.mark.parametrize("arguments", [["x"], ["--expert", "x"], [""], ["--help", "x"], ["/workspace/solution"]])
def test_usage(start: Callable[..., Run], arguments: list[str]) -> None:
    run = start()
    run.write(FIRST)
    assert run.ask(*arguments) == (USAGE.splitlines(), 2)
    assert run.ask("--help") == run.ask("-h") == (USAGE.splitlines(), 0)
    assert run.events() == []


@pytest.mark.parametrize(
    "request_",
    [b"", b"\n", b"{", b"[]\n", b"{}\n", b"3\n", b'{"arguments": 3}\n', b'{"arguments": [3]}\n', b"\xff\n",
     b'{"arguments": null}\n', b"x" * 200_000, b"[" * 60_000 + b"\n"],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_unreadable_requests(start: Callable[..., Run], request_: bytes) -> None:
    run = start()
    try:
        answer = json.loads(run.send(request_))
    except (BrokenPipeError, ConnectionResetError):
        answer = {"text": "the request could not be read", "code": 2}  # it was not even read to its end
    assert answer == {"text": "the request could not be read", "code": 2}
    assert run.events() == []
    assert run.ask("--expert")[1] == 0


def test_a_client_that_says_nothing_or_goes_away(start: Callable[..., Run]) -> None:
    run = start()
    path = str(run.gate.folder / "evaluate.sock")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        run.gate.serve()
        assert b"could not be read" in client.makefile("rb").read()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b'{"arguments": ["--expert"]}\n')
    run.gate.serve()
    assert run.ask("--expert")[1] == 0


def test_no_solution_yet(start: Callable[..., Run]) -> None:
    run = start(patience=1)
    assert run.ask() == ([ABSENT], 2)
    assert run.events() == []
    assert run.state.without_improvement == 0


def test_invalid_solutions_count(start: Callable[..., Run]) -> None:
    run = start(patience=3)
    run.write(FIRST)
    (run.solution / "x").symlink_to("/etc/passwd")
    assert run.ask() == ([
        "evaluation 1: invalid: x is a link: only regular files and folders",
        "2 evaluations left without an improvement",
    ], 1)  # fmt: skip
    assert [type(event) for event in run.events()] == [EvaluationStarted, Evaluation]
    assert run.state.evaluations[0]["kind"] == "invalid"
    run.solution.rename(run.solution.with_name("kept"))
    run.solution.symlink_to("kept")
    assert run.ask() == ([
        "evaluation 2: invalid: solution is not a folder", "1 evaluation left without an improvement",
    ], 1)  # fmt: skip
    with pytest.raises(StopRun) as stop:
        run.ask()
    assert (stop.value.status, stop.value.detail) == ("patience", "3 evaluations in a row without an improvement")
    assert [verdict["number"] for verdict in run.state.evaluations] == [1, 2, 3]


def test_the_last_answer_is_given_before_the_run_ends(start: Callable[..., Run]) -> None:
    run = start(patience=1)
    run.solution.mkdir()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(run.gate.folder / "evaluate.sock"))
        client.sendall(b'{"arguments": []}\n')
        with pytest.raises(StopRun):
            run.gate.serve()
        answer = json.loads(client.makefile("rb").read())
    assert answer["text"].splitlines() == [
        "evaluation 1: invalid: it has no solution.py", "0 evaluations left without an improvement",
    ]  # fmt: skip


def test_the_same_files_are_answered_from_the_record(start: Callable[..., Run]) -> None:
    run = start(patience=20)
    run.recorded(1, FIRST, CORRECT)
    run.recorded(2, OTHER, WRONG)
    run.write(FIRST)
    for number in (3, 4):
        assert run.ask() == ([
            f"evaluation {number}: correct, 1.00 ms, 2.00x ± 1.0 %",
            "the same files as in evaluation 1: not measured again",
            "expert (eager) beside it: 2.00 ms",
            "relative error: out 3.3e-08 (allowed 1.1e-07), total 0.0e+00 (allowed 2.5e-08)",
            f"{21 - number} evaluations left without an improvement",
        ], 0)  # fmt: skip
    run.write(OTHER)
    assert run.ask() == ([
        f"evaluation 5: {WRONG.sentence()}",
        "the same files as in evaluation 2: not measured again",
        "16 evaluations left without an improvement",
    ], 1)  # fmt: skip
    repeated = [(v["number"], v["repeat_of"], v["improved"]) for v in run.state.evaluations]
    assert repeated == [(1, None, True), (2, None, False), (3, 1, False), (4, 1, False), (5, 2, False)]
    assert run.state.champion == 1
    assert Verdict.from_json(run.state.evaluations[2]).standing() == "no improvement: the same files"


def test_a_repeated_champion_ends_the_run(start: Callable[..., Run]) -> None:
    run = start(patience=2)
    run.recorded(1, FIRST, CORRECT)
    run.write(FIRST)
    run.ask()
    with pytest.raises(StopRun):
        run.ask()


def test_what_resets_the_count(start: Callable[..., Run]) -> None:
    """The first correct one whatever its speed, and every improvement; a correct one that is not faster does not."""
    run = start(patience=3)
    run.solution.mkdir(parents=True)
    slower = Verdict(
        "correct", "0.91x", latency=1e-2, expert_latency=2e-3, expert="eager", speedup=0.2, resolution=0.01
    )
    left = []
    for number, verdict in enumerate((WRONG, slower, slower, CORRECT, slower, WRONG), start=1):
        run.recorded(number, solution(HONEST + f"# {number}\n"), verdict)
        left.append(run.gate.text(Verdict.from_json(run.state.evaluations[-1])).splitlines()[-1].split()[0])
    assert left == ["2", "3", "2", "3", "2", "1"]
    with pytest.raises(StopRun):
        run.ask()


def test_another_place_or_time_is_no_other_solution(start: Callable[..., Run]) -> None:
    run = start()
    run.recorded(1, FIRST, CORRECT)
    run.write(FIRST)
    (run.solution / "solution.py").chmod(0o755)
    os.utime(run.solution / "solution.py", (1, 1))
    (run.solution / "__pycache__").mkdir()
    assert "the same files as in evaluation 1: not measured again" in run.ask()[0]


def test_files_are_kept_before_anything_is_written_down(start: Callable[..., Run]) -> None:
    run = start()
    kept: list[dict[str, bytes]] = []

    def look(record: Record) -> None:
        if isinstance(record.event, EvaluationStarted) and record.event.files:
            folder = run.folder / "solutions" / str(record.event.number)
            kept.append({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})

    run.recorded(1, FIRST, CORRECT)
    run.transcript.watch(look)
    run.write(Solution({**FIRST.contents, "src/kernel.cpp": b"int x;\n"}))
    run.recorded(2, Solution({**FIRST.contents, "src/kernel.cpp": b"int x;\n"}), WRONG)
    kept.clear()
    run.ask()
    assert kept == [{**FIRST.contents, "src/kernel.cpp": b"int x;\n"}]


@pytest.mark.parametrize(
    ("verdict", "lines"),
    [
        (CORRECT, ["correct, 1.00 ms, 2.00x ± 1.0 %", "champion", "expert (eager) beside it: 2.00 ms",
                   "relative error: out 3.3e-08 (allowed 1.1e-07), total 0.0e+00 (allowed 2.5e-08)"]),
        (Verdict("correct", "1.003x beside the champion", latency=1e-3, expert_latency=2e-3, expert="eager",
                 speedup=2.0, resolution=0.01, errors={"best": (0.0, 0.0)}),
         ["correct, 1.00 ms, 2.00x ± 1.0 %", "no improvement: 1.003x beside the champion",
          "expert (eager) beside it: 2.00 ms", "relative error: best 0.0e+00 (allowed 0.0e+00)"]),
        (Verdict("build", "SyntaxError at line 3 of the solution", output="a\nb"), None),
        (Verdict("timeout", "a call had not ended after 2 s"), ["timed out: a call had not ended after 2 s"]),
    ],
)  # fmt: skip
def test_words(start: Callable[..., Run], verdict: Verdict, lines: list[str] | None) -> None:
    said = start().gate.text(Verdict(**{**vars(verdict), "number": 7})).splitlines()
    left = "20 evaluations left without an improvement"
    if lines is not None:
        assert said == [f"evaluation 7: {lines[0]}", *lines[1:], left]
    else:
        assert said == [
            "evaluation 7: did not build: SyntaxError at line 3 of the solution", left,
            "what it printed when it was built and called on public inputs:", "a", "b",
        ]  # fmt: skip


def test_an_interrupted_evaluation_of_something_invalid(start: Callable[..., Run]) -> None:
    """Its process was killed between the two lines: the verdict comes under the same number, and counts."""
    run = start()
    run.recorded(1, FIRST, WRONG)
    run.transcript.write(EvaluationStarted(2, "", {}))
    verdict = run.court.again()
    assert (verdict.number, verdict.kind) == (2, "invalid")
    assert run.state.evaluating is None
    assert run.state.without_improvement == 2


def test_an_interrupted_evaluation_of_the_same_files(start: Callable[..., Run]) -> None:
    run = start()
    run.recorded(1, FIRST, CORRECT)
    FIRST.write(run.folder / "solutions" / "2")
    run.transcript.write(EvaluationStarted(2, FIRST.sha256, FIRST.files))
    verdict = run.court.again()
    assert (verdict.number, verdict.repeat_of, verdict.improved) == (2, 1, False)


def test_socket_is_for_the_agent_alone(start: Callable[..., Run]) -> None:
    run = start()
    path = run.gate.folder / "evaluate.sock"
    mode: Any = path.stat()
    assert (stat.S_IMODE(mode.st_mode), mode.st_uid) == (0o600, os.geteuid())
    assert [path.name for path in run.gate.folder.iterdir()] == ["evaluate.sock"]
    run.gate.close()
    assert not run.gate.folder.exists()
