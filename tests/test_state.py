"""State as a fold: live and rebuilt are the same; messages, calls, counters, tokens, time."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from justgoal import events
from justgoal.state import EXIT_CODES, State
from justgoal.transcript import Record, Transcript

BEGIN = datetime(2026, 11, 30, 14, 0, tzinfo=UTC)
HELLO = {"role": "user", "content": [{"type": "text", "text": "the goal"}]}
THINKING = {"type": "thinking", "thinking": "", "signature": "c2ln"}


def fold(written: Iterable[events.Event | tuple[float, events.Event]]) -> State:
    """The state after these events; a number before one is its time in seconds."""
    state = State()
    for seq, item in enumerate(written, 1):
        seconds, event = item if isinstance(item, tuple) else (0.0, item)
        time = (BEGIN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
        state.apply(Record(seq, time, event, "hash"))
    return state


def response(*content: events.Json, stop: str = "end_turn", number: int = 1, **usage: int | None) -> events.Response:
    return events.Response(number, list(content), stop, usage, "m", "msg", "req", 1.0)


def text(words: str) -> events.Json:
    return {"type": "text", "text": words}


def use(identity: str, **arguments: Any) -> events.Json:
    return {"type": "tool_use", "id": identity, "name": "bash", "input": arguments}


def verdict(kind: str, speedup: float | None = None, improved: bool = False, counts: bool = True) -> events.Json:
    return {"kind": kind, "speedup": speedup, "improved": improved, "counts": counts, "number": None}


def test_live_and_rebuilt_states_are_equal(tmp_path: Path) -> None:
    live, rebuilt = State(), State()
    transcript = Transcript.open(tmp_path / "events.jsonl", live.apply)
    for event in (
        events.RunStarted({"task": "t"}),
        events.Goal("the goal", "en", "ab"),
        events.Request(1, [HELLO], "cd"),
        response(THINKING, use("a", command="ls"), stop="tool_use", input_tokens=5),
        events.ToolCall("a", "bash", {"command": "ls"}),
        events.EvaluationStarted(1, "ef", {"solution.py": "01"}),
        events.Evaluation(1, verdict("correct", 1.5)),
        events.Champion(1, 1.5),
        events.ToolResult("a", "out", False, 0.1),
    ):
        transcript.write(event)
    transcript.close()
    Transcript.open(tmp_path / "events.jsonl", rebuilt.apply).close()
    assert live == rebuilt and live.turns == 1


def test_messages_are_what_was_requested_and_what_came_back() -> None:
    answer = response(THINKING, text("so"), use("a"), stop="tool_use")
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "out"}]}
    state = fold(
        [
            events.Goal("the goal", "en", "ab"),
            events.Request(1, [HELLO], "h1"),
            answer,
            events.ToolCall("a", "bash", {}),
            events.ToolResult("a", "out", False, 0.1),
            events.Request(2, [results], "h2"),
        ]
    )
    assert state.messages == [HELLO, {"role": "assistant", "content": answer.content}, results]
    assert state.requested == (3, "h2") and not state.answered and state.calls == []


@pytest.mark.parametrize("content", [[], [THINKING], [text("")], [THINKING, text(" \n")]])
def test_a_response_that_says_nothing_is_no_message(content: list[events.Json]) -> None:
    state = fold([events.Request(1, [HELLO], "h"), response(*content)])
    assert state.messages == [HELLO] and state.answered and (state.turns, state.talk) == (1, 1)


@pytest.mark.parametrize("stop", ["refusal", "model_context_window_exceeded", "a_new_reason"])
def test_unusable_responses_are_counted_but_join_no_conversation(stop: str) -> None:
    state = fold([events.Request(1, [HELLO], "h"), response(text("no"), stop=stop, output_tokens=7)])
    assert state.messages == [HELLO] and not state.answered
    assert (state.turns, state.tokens.output) == (1, 7)


def test_calls_are_open_started_and_answered() -> None:
    written: list[events.Event] = [
        events.Request(1, [HELLO], "h"),
        response(use("a", command="ls"), use("b", command="pwd"), stop="tool_use"),
    ]
    calls = fold(written).unanswered
    assert [(call.id, call.input, call.started, call.cut) for call in calls] == [
        ("a", {"command": "ls"}, False, False),
        ("b", {"command": "pwd"}, False, False),
    ]
    written += [events.ToolCall("a", "bash", {"command": "ls"})]
    assert [call.started for call in fold(written).unanswered] == [True, False]
    written += [events.ToolResult("a", "out", False, 0.1)]
    assert [call.id for call in fold(written).unanswered] == ["b"]


@pytest.mark.parametrize(
    ("content", "stop", "cut"),
    [
        ([use("a"), use("b")], "max_tokens", [False, True]),
        ([use("a"), text("and th")], "max_tokens", [False]),
        ([use("a"), use("b")], "tool_use", [False, False]),
    ],
)
def test_the_length_limit_cuts_the_last_block(content: list[events.Json], stop: str, cut: list[bool]) -> None:
    state = fold([events.Request(1, [HELLO], "h"), response(*content, stop=stop)])
    assert [call.cut for call in state.unanswered] == cut


def test_talk_and_nudges() -> None:
    nudge = {"role": "user", "content": [text("Go on.")]}
    state = fold(
        [
            events.Request(1, [HELLO], "h"),
            response(text("one")),
            events.Request(2, [nudge], "h"),
            events.Request(2, [], "h"),  # interrupted and made again
            response(text("two")),
            events.Request(3, [nudge], "h"),
            response(text("wait"), stop="pause_turn"),
            events.Request(4, [], "h"),
        ]
    )
    assert (state.talk, state.nudges, state.turns) == (3, 2, 3)
    assert fold([events.Request(1, [HELLO], "h"), response(text("x")), response(use("a"))]).talk == 0


def test_tokens_are_added_up_and_unknown_ones_are_none() -> None:
    state = fold(
        [
            response(text("x"), input_tokens=10, output_tokens=2, cache_read_input_tokens=None),
            response(text("x"), input_tokens=1, output_tokens=3, cache_read_input_tokens=90),
            response(text("x"), cache_creation_input_tokens=7),
            response(text("x")),
        ]
    )
    tokens = state.tokens
    assert (tokens.input, tokens.output, tokens.cache_read, tokens.cache_write) == (11, 5, 90, 7)
    assert tokens.total_input == 108


def test_evaluations_champion_and_the_one_in_flight() -> None:
    state = fold(
        [
            events.EvaluationStarted(1, "s1", {}),
            events.Evaluation(1, verdict("correct", 2.0, improved=True)),
            events.Champion(1, 2.0),
            events.EvaluationStarted(2, "s2", {}),
            events.Evaluation(2, verdict("correct", 2.5)),
            events.EvaluationStarted(3, "s3", {}),
            events.Evaluation(3, verdict("wrong")),
            events.EvaluationStarted(4, "s4", {}),
        ]
    )
    assert [seen["number"] for seen in state.evaluations] == [1, 2, 3]
    assert state.evaluating == events.EvaluationStarted(4, "s4", {}) and state.next_evaluation == 4
    assert (state.champion, state.without_improvement) == (1, 2)
    assert fold([]).next_evaluation == 1


def test_time_of_failed_attempts_waits_and_pauses_does_not_count() -> None:
    retry = events.Retry(1, 1, "overloaded_error: x", 529, 100.0)
    state = fold(
        [
            (0, events.RunStarted({})),
            (10, events.Request(1, [HELLO], "h")),  # 10 s of work
            (40, retry),  # a failed attempt of 30 s, then a wait of 100 s
            (145, retry),  # another one of 5 s
            (265, response(text("x"))),  # the wait, then 20 s that succeeded
            (270, events.Paused("Ctrl-C")),  # 5 s
            (5000, events.Resumed("same command")),
            (5003, events.Request(2, [], "h")),  # 3 s
            (5050, retry),
            (5060, events.Paused("Ctrl-C during the wait")),
            (9000, events.Resumed("same command")),
            (8990, events.Request(2, [], "h")),  # the clock was set back
            (8991, response(text("x"))),  # 1 s
        ]
    )
    assert state.active_seconds == pytest.approx(10 + 20 + 5 + 3 + 1)
    assert state.started_at == BEGIN and state.updated_at == BEGIN + timedelta(seconds=8991)


@pytest.mark.parametrize(
    ("written", "status", "detail"),
    [
        ([], "running", ""),
        ([events.Paused("Ctrl-C")], "interrupted", "Ctrl-C"),
        ([events.Paused("Ctrl-C"), events.Resumed("again")], "running", ""),
        ([events.Stopped("patience", "20 in a row")], "patience", "20 in a row"),
    ],
)
def test_status(written: list[events.Event], status: str, detail: str) -> None:
    state = fold(written)
    assert (state.status, state.detail) == (status, detail)
    assert status == "running" or status in EXIT_CODES


def test_the_final_verdict() -> None:
    assert fold([events.Final(verdict("correct", 2.0), 1)]).final == events.Final(verdict("correct", 2.0), 1)
