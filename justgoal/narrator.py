"""Tells a view what happens in a run, from the records as they are written."""

from typing import Any

from justgoal import figures
from justgoal.evaluation.verdict import Verdict
from justgoal.events import Champion, Evaluation, Final, Paused, Request, Response, Stopped, ToolCall
from justgoal.state import State
from justgoal.stopping import Patience
from justgoal.terminal import View
from justgoal.transcript import Record


class Narrator:
    """An observer of a transcript."""

    def __init__(self, view: View, state: State, patience: Patience) -> None:
        self._view = view
        self._state = state
        self._patience = patience

    def __call__(self, record: Record) -> None:
        match record.event:
            case Request():
                self._view.status("model is thinking")
            case Response():
                self._view.status(tokens=self._state.tokens.total_input + self._state.tokens.output)
            case ToolCall():
                self._view.status("running a command", evaluation=self._state.next_evaluation)
            case Evaluation(number, value):
                self._evaluation(number, Verdict.from_json(value))
            case Champion(number, _):
                verdict = Verdict.from_json(self._state.evaluations[-1])
                self._view.status(champion=(verdict.speedup or 0.0, verdict.resolution or 0.0))
            case Paused(reason):
                self._view.line(f"paused: {reason}", "yellow")
            case Stopped(status, detail):
                self.ending(status, detail)

    def ending(self, status: str, detail: str) -> None:
        """How the run ended, and with what."""
        self._view.line(f"stopped: {detail or status}", "bold")
        final = self._state.final or Final(None, None)
        self._final(final.verdict, final.champion)

    def _evaluation(self, number: int, verdict: Verdict) -> None:
        left = self._patience.left(self._state.evaluations)
        standing = f", {verdict.standing()}" if verdict.standing() else ""
        style = "green" if verdict.improved else "" if verdict.correct else "red"
        self._view.line(f"evaluation {number}: {verdict.sentence()}{standing}; {left} left", style)
        self._view.status(left=left, evaluation=number)

    def _final(self, value: dict[str, Any] | None, number: int | None) -> None:
        if value is None:
            self._view.line("final: no solution was correct", "bold red")
            return
        verdict = Verdict.from_json(value)
        if not verdict.correct or verdict.speedup is None:
            self._view.line(f"final: evaluation {number} judged afresh: {verdict.sentence()}", "bold red")
            return
        speedup = figures.speedup(verdict.speedup, verdict.resolution)
        self._view.line(
            f"final: evaluation {number} judged afresh: correct, {speedup} over the expert ({verdict.expert})",
            "bold green",
        )
