"""`justgoal show` sums up whatever is in a run folder, and nothing in it acts on the terminal."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from justgoal import events, show
from justgoal.errors import UsageError
from justgoal.evaluation.verdict import Verdict
from justgoal.transcript import Transcript

RUN = {"task": "op/w", "device": "cpu", "processor": "Some CPU", "cores": 2, "model": "claude-opus-5-5"}
USAGE = {"input_tokens": 1_000_000, "cache_read_input_tokens": 900_000, "output_tokens": 212_000}
WHY = "output 1 (state): worst head is 4.1x the allowed error; all other outputs pass"
WRONG = Verdict("wrong", WHY, number=1)
FIRST = Verdict("correct", number=2, latency=22.4e-3, speedup=2.76, resolution=0.009, improved=True)
SLOWER = Verdict("correct", "1.003x ± 0.9 %", number=3, latency=22.3e-3, speedup=2.77, resolution=0.009)
FINAL = Verdict("correct", latency=22.5e-3, speedup=2.75, resolution=0.007, expert="compiled")
JUDGED: list[events.Event] = [
    events.EvaluationStarted(1, "a" * 64, {"solution.py": "b" * 64}),
    events.Evaluation(1, WRONG.to_json()),
    events.EvaluationStarted(2, "c" * 64, {"solution.py": "d" * 64}),
    events.Evaluation(2, FIRST.to_json()),
    events.Champion(2, 2.76),
    events.EvaluationStarted(3, "e" * 64, {"solution.py": "f" * 64}),
    events.Evaluation(3, SLOWER.to_json()),
]
ENDED: list[events.Event] = [
    events.Stopped("patience", "1 evaluation in a row without an improvement"),
    events.Final(FINAL.to_json(), 2),
]


def response(usage: dict[str, int]) -> list[events.Event]:
    """A turn of the model that says one word."""
    content = [{"type": "text", "text": "yes"}]
    return [
        events.Request(1, [{"role": "user", "content": "goal"}], "0" * 64),
        events.Response(1, content, "end_turn", usage, "claude-opus-5-5", "msg_1", None, 1.0),
    ]


def write(folder: Path, *written: events.Event, run: dict[str, Any] = RUN) -> Path:
    """A run folder with these events after the first line."""
    folder.mkdir(parents=True)
    transcript = Transcript.open(folder / "events.jsonl")
    for event in (events.RunStarted(run), *written):
        transcript.write(event)
    transcript.close()
    return folder


def shown(folder: Path) -> str:
    """What show prints, without spaces at line ends and with every time as T."""
    stream = io.StringIO()
    show.show(folder, stream)
    return re.sub(r" +\n", "\n", re.sub(r"\d\d:\d\d:\d\d", "T", stream.getvalue()))


def test_a_finished_run(tmp_path: Path) -> None:
    summary = shown(write(tmp_path / "op-w-1", *response(USAGE), *JUDGED, *ENDED))
    assert summary.partition("─")[0] == (
        "run          op-w-1\n"
        "task         op/w, cpu (Some CPU, 2 cores)\n"
        "model        claude-opus-5-5\n"
        "status       patience: 1 evaluation in a row without an improvement\n"
        "time         T, 1 turn, 1.9M tokens in, 212k out\n"
        "result       evaluation 2: 2.75x ± 0.7 % over the expert (compiled)\n"
        "\n"
        "evaluation       time   latency         speedup   champion   outcome\n"
    )


UNFINISHED = "unfinished: the command that started it goes on with it"
BEST = "evaluation 2: correct, 22.4 ms, 2.76x ± 0.9 %; not judged afresh"
GAVE_UP: list[events.Event] = [events.Stopped("max_turns", "9 turns used"), events.Final(None, None)]


@pytest.mark.parametrize(
    ("written", "status", "result"),
    [
        ([], UNFINISHED, "no evaluation"),
        (JUDGED[:2], UNFINISHED, "no correct solution"),
        (JUDGED[:3], UNFINISHED, "no correct solution"),
        ([*JUDGED, events.Paused("Ctrl-C")], "interrupted: Ctrl-C", BEST),
        ([events.Stopped("refused", "")], "refused", "no evaluation"),
        ([*JUDGED[:2], *GAVE_UP], "max_turns: 9 turns used", "no correct solution"),
    ],
)
def test_an_unfinished_run(tmp_path: Path, written: list[events.Event], status: str, result: str) -> None:
    found = dict(show.lines(show.read(write(tmp_path / "run", *written))))
    assert (found["status"], found["result"]) == (status, result)


def test_an_evaluation_without_a_verdict_is_in_the_table(tmp_path: Path) -> None:
    assert re.search(r"\n +2 +T +not judged yet\n", shown(write(tmp_path / "run", *JUDGED[:3])))


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    transcript = Transcript.open(folder / "events.jsonl")
    assert dict(show.lines(show.read(folder)))["status"] == "running"
    transcript.close()


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *JUDGED)
    before = shown(folder)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":9,"time":"2026')
    assert shown(folder) == before


def damaged(folder: Path) -> tuple[str, str]:
    """What show prints of a damaged run, and its error."""
    stream = io.StringIO()
    with pytest.raises(UsageError) as error:
        show.show(folder, stream)
    return stream.getvalue(), str(error.value)


def test_a_flipped_byte_is_named_and_what_comes_before_it_is_shown(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *JUDGED)
    path = folder / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"0.0224", b"0.0124")
    path.write_bytes(b"".join(lines))
    output, error = damaged(folder)
    assert error == f"transcript {path} line 5: hash does not match; what is shown ends before it"
    assert "wrong: output 1 (state)" in output and "ms" not in output and "not judged yet" in output


@pytest.mark.parametrize(
    "event",
    [
        events.Evaluation(1, {}),
        events.Evaluation(1, {**WRONG.to_json(), "kind": "splendid"}),
        events.Evaluation(1, {**FIRST.to_json(), "latency": None}),
        events.ToolResult("nobody", "", False, 0.0),
        events.Response(1, [{}], "end_turn", {}, "m", "i", None, 1.0),
        events.Response(1, [], "end_turn", {"input_tokens": "many"}, "m", "i", None, 1.0),
    ],
)
def test_a_chain_that_holds_but_makes_no_run_is_damaged_too(tmp_path: Path, event: events.Event) -> None:
    written = write(tmp_path / "source", *JUDGED[:2])
    transcript = Transcript.open(written / "events.jsonl")
    transcript.write(event)
    transcript.close()
    output, error = damaged(written)
    assert f"transcript {written}/events.jsonl line 4: it does not fit what comes before it: " in error
    assert "wrong: output 1 (state)" in output


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\x00\n", b"x" * 5_000_000])
def test_files_that_never_were_a_transcript(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(content)
    found = dict(show.lines(show.read(tmp_path)))
    assert found["result"] == "no evaluation"


HOSTILE = (
    "\x1b[31m\x1b]8;;http://example.org\x1b\\\x1b]52;c;cm0=\x07\x1bP1$r\x9b2J[red][/]\u202e\u200b\ud800\r\n[00:00:01] x"
)
TAMED = (
    r"\x1b[31m\x1b]8;;http://example.org\x1b\\x1b]52;c;cm0=\x07\x1bP1$r"
    r"\x9b2J[red][/]\u202e\u200b\ud800\n[00:00:01] x"
)


def test_a_hostile_transcript_is_shown_harmlessly_and_completely(tmp_path: Path) -> None:
    judged = Verdict("wrong", HOSTILE, number=1)
    folder = write(
        tmp_path / "run",
        events.EvaluationStarted(1, HOSTILE, {HOSTILE: HOSTILE}),
        events.Evaluation(1, judged.to_json()),
        events.Stopped("failed", HOSTILE),
        run={**RUN, "model": HOSTILE, "processor": HOSTILE, "task": HOSTILE},
    )
    stream = io.StringIO()
    show.show(folder, stream)
    output = stream.getvalue()
    assert not [c for c in output if c != "\n" and not c.isprintable()]
    above, _, table = output.partition("\n\n")
    assert above.splitlines() == [
        "run          run",
        f"task         {TAMED}, cpu ({TAMED}, 2 cores)",
        f"model        {TAMED}",
        f"status       failed: {TAMED}",
        "time         00:00:00, 0 turns, 0 tokens in, 0 out",
        "result       no correct solution",
    ]
    assert table.splitlines()[-1].endswith(f"wrong: {TAMED}")
