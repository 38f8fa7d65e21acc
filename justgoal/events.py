"""The events of a run: what a line of a transcript can say.

Their names and fields are the file format (see transcript.py). Fields are added at the end with a default, so
that older transcripts can still be read; none is ever renamed or removed.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """The base of all events; each subclass below is one type of line."""


@dataclass(frozen=True)
class RunStarted(Event):
    """The first line: `run` is run.json."""

    run: Json


@dataclass(frozen=True)
class Goal(Event):
    """The first words to the model; `sha256` is that of `text`."""

    text: str
    language: str
    sha256: str


@dataclass(frozen=True)
class Request(Event):
    """Turn `number` is about to be asked for: the messages that are new since the last request.

    `sha256` is that of the whole body (agent.body_sha256). A request that was interrupted is made again
    under the same number, then without new messages.
    """

    number: int
    messages: list[Json]
    sha256: str


@dataclass(frozen=True)
class Response(Event):
    """Turn `number` as the model gave it: raw content blocks, usage as reported, seconds the call took."""

    number: int
    content: list[Json]
    stop_reason: str
    usage: Json
    model: str
    message_id: str
    request_id: str | None
    seconds: float
    stop_details: Json | None = None


@dataclass(frozen=True)
class Retry(Event):
    """An attempt at request `number` failed; the next one follows after `wait` seconds."""

    number: int
    attempt: int
    error: str
    status: int | None
    wait: float
    request_id: str | None = None


@dataclass(frozen=True)
class ToolCall(Event):
    """A tool call of the model is about to be executed."""

    id: str
    name: str
    input: Json


@dataclass(frozen=True)
class ToolResult(Event):
    """What the model is told about a tool call."""

    id: str
    content: str
    is_error: bool
    seconds: float


@dataclass(frozen=True)
class EvaluationStarted(Event):
    """`solution` is the SHA-256 of the tree, `files` that of each file by its path."""

    number: int
    solution: str
    files: dict[str, str]


@dataclass(frozen=True)
class Evaluation(Event):
    """`verdict` is Verdict.to_json()."""

    number: int
    verdict: Json


@dataclass(frozen=True)
class Champion(Event):
    """Evaluation `number` is the fastest correct solution from now on."""

    number: int
    speedup: float


@dataclass(frozen=True)
class SandboxLost(Event):
    reason: str


@dataclass(frozen=True)
class Paused(Event):
    """This process ends here; the same command goes on."""

    reason: str


@dataclass(frozen=True)
class Resumed(Event):
    """The first line of a process that goes on with the run."""

    reason: str


@dataclass(frozen=True)
class Stopped(Event):
    """The run is over; `status` is one of state.EXIT_CODES."""

    status: str
    detail: str


@dataclass(frozen=True)
class Final(Event):
    """The champion judged afresh at the end; both None where no solution was ever correct."""

    verdict: Json | None
    champion: int | None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


TYPES: dict[str, type[Event]] = {_snake_case(kind.__name__): kind for kind in Event.__subclasses__()}
NAMES = {kind: name for name, kind in TYPES.items()}
FIELDS = {kind: {field.name for field in fields(kind)} for kind in TYPES.values()}
