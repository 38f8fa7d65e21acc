"""What is known about a run: a fold over the records of its transcript, and nothing else.

A live run and a resumed one apply the same records, so they hold the same messages, counters and champion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from justgoal import events, stopping
from justgoal.events import Json
from justgoal.transcript import Record

EXIT_CODES: Mapping[str, int] = {
    "patience": 0,
    "recording_ended": 0,
    "max_hours": 0,
    "max_turns": 0,
    "interrupted": 3,
    "refused": 4,
    "failed": 5,
    "talked": 5,
}
"""How a run can end, and the exit code of each way. A run that has not ended is "running"."""

HISTORY = {"tool_use", "end_turn", "stop_sequence", "max_tokens", "pause_turn"}
"""Stop reasons of a response that joins the conversation; after any other the turn is asked for again."""


@dataclass
class Tokens:
    """Totals as the model's server reports them; `input` are those that no cache served or stored."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0

    @property
    def total_input(self) -> int:
        return self.input + self.cache_read + self.cache_write

    def add(self, usage: Json) -> None:
        self.input += usage.get("input_tokens") or 0
        self.output += usage.get("output_tokens") or 0
        self.cache_read += usage.get("cache_read_input_tokens") or 0
        self.cache_write += usage.get("cache_creation_input_tokens") or 0


@dataclass
class Call:
    """A tool call of the newest response. `cut`: the response ended inside it; `started`: its line exists."""

    id: str
    name: str
    input: Json
    cut: bool
    started: bool = False
    result: events.ToolResult | None = None


@dataclass
class State:
    """`messages` is the conversation as last requested, with the response to it; it is only appended to.

    `calls` are the tool calls of the newest response. `requested` is the length of the conversation and the
    hash of the body at the last request, `answered` whether its response has come. `talk` counts responses
    without a tool call in a row, `nudges` the continuations sent. `evaluations` are verdicts in order.
    `active_seconds` leaves out failed attempts at a request, the waits after them, and the time between
    processes.
    """

    run: Json = field(default_factory=dict)
    goal: events.Goal | None = None
    messages: list[Json] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    requested: tuple[int, str] | None = None
    answered: bool = True
    stop_reason: str | None = None
    turns: int = 0
    talk: int = 0
    nudges: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    evaluations: list[Json] = field(default_factory=list)
    evaluating: events.EvaluationStarted | None = None
    champion: int | None = None
    active_seconds: float = 0.0
    status: str = "running"
    detail: str = ""
    final: events.Final | None = None
    last_hash: str = ""
    started_at: datetime | None = None
    updated_at: datetime | None = None
    _waiting: float = 0.0

    @property
    def unanswered(self) -> list[Call]:
        return [call for call in self.calls if call.result is None]

    @property
    def without_improvement(self) -> int:
        return stopping.without_improvement(self.evaluations)

    @property
    def next_evaluation(self) -> int:
        """The number of the next evaluation; that of the one in flight where one was started."""
        return self.evaluating.number if self.evaluating else len(self.evaluations) + 1

    def apply(self, record: Record) -> None:
        """Take in the next record of the transcript."""
        self._clock(record)
        self.last_hash = record.hash
        match record.event:
            case events.RunStarted(run):
                self.run = run
            case events.Goal() as goal:
                self.goal = goal
            case events.Request() as request:
                self._request(request)
            case events.Response() as response:
                self._response(response)
            case events.ToolCall(id=called):
                self._call(called).started = True
            case events.ToolResult(id=called) as result:
                self._call(called).result = result
            case events.EvaluationStarted() as started:
                self.evaluating = started
            case events.Evaluation(number, verdict):
                self._evaluation({**verdict, "number": number})
            case events.Champion(number, _):
                self.champion = number
            case events.Paused(reason):
                self.status, self.detail = "interrupted", reason
            case events.Resumed():
                self.status, self.detail = "running", ""
            case events.Stopped(status, detail):
                self.status, self.detail = status, detail
            case events.Final() as final:
                self.final = final

    def _clock(self, record: Record) -> None:
        now = datetime.fromisoformat(record.time)
        if self.updated_at is None or self.started_at is None:
            self.started_at = self.updated_at = now
        passed = (now - self.updated_at).total_seconds()
        if not isinstance(record.event, events.Resumed | events.Retry):
            self.active_seconds += max(0.0, passed - self._waiting)
        self._waiting = record.event.wait if isinstance(record.event, events.Retry) else 0.0
        self.updated_at = now

    def _request(self, request: events.Request) -> None:
        if self.turns and self.answered and not self.calls and request.messages:
            self.nudges += 1
        self.messages.extend(request.messages)
        self.calls = []
        self.requested = len(self.messages), request.sha256
        self.answered = False

    def _response(self, response: events.Response) -> None:
        self.turns += 1
        self.tokens.add(response.usage)
        self.stop_reason = response.stop_reason
        if response.stop_reason not in HISTORY:
            return
        self.answered = True
        if says_something(response.content):
            self.messages.append({"role": "assistant", "content": response.content})
        uses = [block for block in response.content if block["type"] == "tool_use"]
        self.calls = [Call(use["id"], use["name"], use["input"], cut=False) for use in uses]
        if response.stop_reason == "max_tokens" and uses and response.content[-1] is uses[-1]:
            self.calls[-1].cut = True
        self.talk = 0 if uses else self.talk + 1

    def _call(self, called: str) -> Call:
        return next(call for call in self.calls if call.id == called)

    def _evaluation(self, verdict: Json) -> None:
        self.evaluating = None
        self.evaluations.append(verdict)
        if verdict["improved"]:
            self.champion = verdict["number"]


def says_something(content: list[dict[str, Any]]) -> bool:
    """Whether a response can be sent back: servers refuse one that is thinking or empty text alone."""
    return any(
        block["type"] not in ("thinking", "redacted_thinking") and (block["type"] != "text" or block["text"].strip())
        for block in content
    )
