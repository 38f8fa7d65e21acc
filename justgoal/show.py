"""`justgoal show RUN`: sums up any run from its transcript, be it unfinished, running or damaged."""

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from justgoal import events, figures, terminal, transcript
from justgoal.errors import UsageError
from justgoal.evaluation.verdict import Verdict
from justgoal.state import State
from justgoal.transcript import Record, TranscriptError

WIDE = 100_000
"""Columns of a table that is not for a terminal: no row of it is ever broken."""


@dataclass
class Row:
    """One evaluation; `seconds` is the age of the run when its verdict came."""

    number: int
    seconds: float
    verdict: Verdict
    champion: bool = False

    def cells(self) -> tuple[str, ...]:
        verdict = self.verdict
        latency = speedup = ""
        outcome = verdict.sentence()
        if verdict.latency is not None and verdict.speedup is not None:
            latency = figures.latency(verdict.latency)
            speedup = figures.speedup(verdict.speedup, verdict.resolution)
        if verdict.correct:
            outcome = "correct" if self.champion else f"correct, {verdict.standing()}"
        champion = "champion" if self.champion else ""
        return str(self.number), figures.elapsed(self.seconds), latency, speedup, champion, outcome


@dataclass
class Summary:
    """What could be read of a run; `damage` says why no more of it could."""

    folder: Path
    state: State = field(default_factory=State)
    rows: list[Row] = field(default_factory=list)
    damage: TranscriptError | None = None
    running: bool = False

    def take(self, record: Record) -> None:
        self.state.apply(record)
        event = record.event
        if isinstance(event, events.Evaluation):
            verdict = Verdict.from_json(event.verdict)
            verdict.sentence()
            self.rows.append(Row(event.number, self.state.active_seconds, verdict))
        elif isinstance(event, events.Champion):
            for row in self.rows:
                row.champion = row.champion or row.number == event.number


def read(folder: Path) -> Summary:
    """Everything up to the end of the transcript or to its first line that is not what was written."""
    path = folder / "events.jsonl"
    summary = Summary(folder, running=_is_being_written(path))
    last = 0
    try:
        for record in transcript.read(path):
            last = record.seq
            summary.take(record)
    except TranscriptError as error:
        summary.damage = error
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, StopIteration) as error:
        # The chain holds but the content makes no run: somebody wrote the file by hand.
        summary.damage = TranscriptError(path, last, f"it does not fit what comes before it: {error!r}")
    return summary


def _is_being_written(path: Path) -> bool:
    """Whether a runtime holds the transcript's lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # reading it will say what is wrong
    return False


def show(folder: Path, stream: TextIO) -> None:
    """Print the summary. A damaged transcript is an error, after what could be read of it has been shown."""
    summary = read(folder)
    for name, text in lines(summary):
        print(f"{name:<12} {terminal.one_line(text)}", file=stream)
    if summary.rows or summary.state.evaluating:
        print(file=stream)
        _print_table(summary, stream)
    if summary.damage:
        raise UsageError(f"{summary.damage}; what is shown ends before it")


def lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """The lines above the table: name and text."""
    state, run = summary.state, summary.state.run
    yield "run", summary.folder.resolve().name
    if run:
        device = f"{run.get('device')} ({run.get('processor')}, {run.get('cores')} cores)"
        yield "task", f"{run.get('task')}, {device}"
        yield "model", str(run.get("model"))
    yield "status", _status(summary)
    time, turns = figures.elapsed(state.active_seconds), figures.amount(state.turns, "turn")
    asked, answered = figures.tokens(state.tokens.total_input), figures.tokens(state.tokens.output)
    yield "time", f"{time}, {turns}, {asked} tokens in, {answered} out"
    yield "result", _result(summary)
    if strength := run.get("strength"):
        yield "check", figures.strength(**strength)


def _status(summary: Summary) -> str:
    state = summary.state
    if state.status != "running":
        return f"{state.status}: {state.detail}" if state.detail else state.status
    return "running" if summary.running else "unfinished: the command that started it goes on with it"


def _result(summary: Summary) -> str:
    """The final evaluation, or the champion so far, or that nothing was correct."""
    final = summary.state.final
    if final is not None and final.verdict is not None:
        verdict = Verdict.from_json(final.verdict)
        if verdict.correct and verdict.speedup is not None:
            speedup = figures.speedup(verdict.speedup, verdict.resolution)
            return f"evaluation {final.champion}: {speedup} over the expert ({verdict.expert})"
        return f"evaluation {final.champion}: {verdict.sentence()}"
    champions = [row for row in summary.rows if row.champion]
    if champions:
        return f"evaluation {champions[-1].number}: {champions[-1].verdict.sentence()}; not judged afresh"
    return "no correct solution" if summary.rows else "no evaluation"


def _print_table(summary: Summary, stream: TextIO) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("evaluation", "time", "latency", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("champion", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for cells in _cells(summary):
        table.add_row(*[terminal.rich_text(terminal.one_line(cell)) for cell in cells])
    console = terminal.console(stream, None if terminal.is_terminal(stream) else WIDE)
    with console.capture() as capture:
        console.print(table, soft_wrap=False)
    for line in capture.get().splitlines():
        print(line.rstrip(), file=stream)


def _cells(summary: Summary) -> Iterator[tuple[str, ...]]:
    yield from (row.cells() for row in summary.rows)
    if summary.state.evaluating:
        seconds = figures.elapsed(summary.state.active_seconds)
        yield str(summary.state.evaluating.number), seconds, "", "", "", "not judged yet"
