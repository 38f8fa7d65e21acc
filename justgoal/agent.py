"""The loop: the model, then its tools, then the model, until something ends the run.

Every step is in the transcript before it has an effect, and all that the loop knows it reads from `State`: so
the run of a process that was killed anywhere goes on where it was. The conversation only grows at its end.
"""

import json
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NoReturn, Protocol

from justgoal.errors import Fatal, Refused, Resumable, StopRun, UsageError
from justgoal.events import Goal, Json, Request, Response, ToolCall, ToolResult
from justgoal.goal import Words
from justgoal.models import Model
from justgoal.state import HISTORY, Call, State
from justgoal.stopping import Budgets, Ending, Patience
from justgoal.transcript import Transcript

TALK = 5
"""Responses in a row without a tool call after which a run is given up."""


class Outcome(Protocol):
    @property
    def content(self) -> str: ...

    @property
    def is_error(self) -> bool: ...


class Toolbox(Protocol):
    """What a model can do; `execute` answers bad input with an error, and raises only what ends the run."""

    def definitions(self) -> list[dict[str, Any]]: ...

    def execute(self, name: str, input: dict[str, Any]) -> Outcome: ...


def run_agent(
    model: Model,
    tools: Toolbox,
    transcript: Transcript,
    state: State,
    patience: Patience,
    budgets: Budgets,
    goal: Goal,
    words: Words,
    before_request: Callable[[], None] = lambda: None,
    after_request: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Work on the goal, or go on with it. Ends by an exception only: StopRun, an error, or Ctrl-C.

    `transcript` must have `state.apply` among its observers. The hooks enclose the time in which a request
    is open.
    """
    definitions = tools.definitions()
    if state.goal is None:
        transcript.write(goal)
    check_history(model, definitions, state)
    # The process before this one may have ended between the last verdict and its consequence.
    stop_if(patience.exceeded(state.evaluations))
    while True:
        for call in state.unanswered:
            answer(call, tools, transcript, words)
        stop_if(patience.exceeded(state.evaluations) or talked(state) or budgets.exceeded(state))

        number, messages = state.turns + 1, new_messages(state, words)
        body = body_sha256(model, definitions, [*state.messages, *messages])
        transcript.write(Request(number, messages, body))
        try:
            before_request()
            response = model.query(number, state.messages, definitions, transcript.write)
        finally:
            after_request()
        transcript.write(response)
        stop_unless_usable(response)


def answer(call: Call, tools: Toolbox, transcript: Transcript, words: Words) -> None:
    """Execute a tool call and write its result down, also when the run ends inside it."""
    begun, stop = time.monotonic(), None
    if call.started:  # by a process that was stopped: what it did until then nobody knows
        content, is_error = words.interrupted, True
    elif call.cut:
        content, is_error = words.cut, True
    else:
        transcript.write(ToolCall(call.id, call.name, call.input))
        try:
            outcome = tools.execute(call.name, call.input)
            content, is_error = outcome.content, outcome.is_error
        except StopRun as reason:
            content, is_error, stop = reason.output, False, reason
    transcript.write(ToolResult(call.id, content, is_error, round(time.monotonic() - begun, 6)))
    if stop:
        raise stop


def new_messages(state: State, words: Words) -> list[Json]:
    """What the conversation lacks before the next request."""
    if state.requested is None:
        assert state.goal is not None
        return [user(text(state.goal.text))]
    if not state.answered:
        return []  # the same request once more
    if state.calls:
        return [user(*(tool_result(call) for call in state.calls))]
    if state.stop_reason == "pause_turn":
        return []
    return [user(text(words.continuation))]


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def tool_result(call: Call) -> Json:
    """Without `content` where it is empty (servers refuse empty text), with `is_error` only if it is one."""
    assert call.result is not None
    block: Json = {"type": "tool_result", "tool_use_id": call.id}
    if call.result.content:
        block["content"] = call.result.content
    if call.result.is_error:
        block["is_error"] = True
    return block


def stop_if(ending: Ending | None) -> None:
    if ending:
        raise StopRun(*ending)


def talked(state: State) -> Ending | None:
    return ("talked", f"{TALK} responses in a row without a tool call") if state.talk >= TALK else None


def stop_unless_usable(response: Response) -> None:
    """A response that cannot join the conversation ends the run, resumably where asking again may help."""
    reason = response.stop_reason
    if reason in HISTORY:
        return
    if reason == "refusal":
        details = response.stop_details or {}
        said = ": ".join(str(details[name]) for name in ("category", "explanation") if details.get(name))
        raise Refused(f"the model refused at turn {response.number}" + (f" ({said})" if said else ""))
    if reason == "model_context_window_exceeded":
        raise Fatal(f"the conversation no longer fits the model's context at turn {response.number}")
    raise Resumable(f"turn {response.number} ended for a reason that this version does not know: {reason!r}")


def body_sha256(model: Model, definitions: list[Json], messages: list[Json]) -> str:
    """Of the request's body as canonical JSON, without the marks for caching, which say nothing."""
    body = {"model": model.name, **model.parameters, "messages": messages, "tools": definitions}
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_history(model: Model, definitions: list[Json], state: State) -> None:
    """Whether what was rebuilt from the transcript is what was last sent, to the byte."""
    if state.requested is None:
        return
    length, digest = state.requested
    if body_sha256(model, definitions, state.messages[:length]) != digest:
        raise UsageError(
            "the last request of this run cannot be rebuilt: the model, its parameters or prompts/tools.json "
            "are not those of then; put them back, or start another run with --name"
        )
