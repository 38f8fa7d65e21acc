"""The loop as a whole: the real SDK, a real server, a real transcript; only the tools execute nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from messages_server import Json, MessagesServer, Status, Stream, message, say, stream_of, text, use

from justgoal import events, goal, resources
from justgoal.agent import TALK, Toolbox, body_sha256, run_agent
from justgoal.errors import Fatal, JustgoalError, Refused, Resumable, StopRun, UsageError
from justgoal.events import Event
from justgoal.models import Model
from justgoal.models.anthropic import Anthropic
from justgoal.models.recorded import Recorded
from justgoal.state import State
from justgoal.stopping import Budgets, Patience
from justgoal.transcript import Record, Transcript, read

GOAL = goal.render(resources.prompts(), "en", operator="op", workload="wl", device="cpu", patience=3)
WORDS = goal.words(resources.prompts())
FIRST = {"role": "user", "content": [text(GOAL.text)]}
NUDGE = {"role": "user", "content": [text(WORDS.continuation)]}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}


@dataclass(frozen=True)
class Echoed:
    content: str
    is_error: bool = False


@dataclass
class Echo:
    """Stands in for the sandbox: answers a command with itself; that is an error for `fail`."""

    executed: list[tuple[str, Json]] = field(default_factory=list)
    on_execute: Callable[[str], None] = lambda command: None
    description: str = "a shell"

    def definitions(self) -> list[Json]:
        return [{"name": "bash", "description": self.description, "input_schema": {"type": "object"}}]

    def execute(self, name: str, input: Json) -> Echoed:
        self.executed.append((name, input))
        command = str(input.get("command", ""))
        self.on_execute(command)
        return Echoed(command, is_error=command == "fail")


class Run:
    """A run folder; `go` starts a process' worth of the loop on it and returns how that ended."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events.jsonl"
        self.state = State()
        self.tools = Echo()
        self.patience = Patience(3)
        self.budgets = Budgets()
        self.watched: list[Record] = []
        self.transcript = Transcript.open(self.path, self.state.apply)
        self.transcript.watch(self.watched.append)

    def go(self, model: Model, **hooks: Callable[[], None]) -> BaseException:
        tools: Toolbox = self.tools
        try:
            run_agent(model, tools, self.transcript, self.state, self.patience, self.budgets, GOAL, WORDS, **hooks)
        except (StopRun, JustgoalError, KeyboardInterrupt) as ending:
            return ending
        finally:
            self.transcript.close()

    def types(self) -> list[str]:
        return [events.NAMES[type(record.event)] for record in read(self.path, strict=True)]

    def written(self, kind: type[Event]) -> list[Any]:
        return [record.event for record in read(self.path, strict=True) if isinstance(record.event, kind)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def again(tmp_path: Path) -> Callable[[], Run]:
    """The next process on the same run."""

    def open_again() -> Run:
        run = Run(tmp_path)
        run.transcript.write(events.Resumed("the same command"))
        return run

    return open_again


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[MessagesServer], Anthropic]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    opened: list[Anthropic] = []

    def to(server: MessagesServer) -> Anthropic:
        opened.append(Anthropic("some-model", "key", server.url, sleep=lambda seconds: None))
        return opened[-1]

    yield to
    for model in opened:
        model.close()


Connect = Callable[[MessagesServer], Anthropic]


def results(*blocks: Json) -> Json:
    return {"role": "user", "content": [{"type": "tool_result", **block} for block in blocks]}


def test_the_whole_loop(run: Run, connect: Connect) -> None:
    """Every request holds the history so far, unchanged, and every step is in the transcript in order."""
    first = [THINKING, text("let me look"), use("a", command="ls")]
    second = [use("b", command="fail"), use("c", command=""), use("d", command="pwd")]
    third = [text("done")]
    run.budgets = Budgets(max_turns=4)
    with MessagesServer(
        say(*first, stop="tool_use"), say(*second, stop="tool_use"), say(*third), say(use("e", command="x"))
    ) as server:
        ending = run.go(connect(server))
    assert isinstance(ending, StopRun) and ending.status == "max_turns"

    history = [
        FIRST,
        {"role": "assistant", "content": first},
        results({"tool_use_id": "a", "content": "ls"}),
        {"role": "assistant", "content": second},
        results(
            {"tool_use_id": "b", "content": "fail", "is_error": True},
            {"tool_use_id": "c"},
            {"tool_use_id": "d", "content": "pwd"},
        ),
        {"role": "assistant", "content": third},
        NUDGE,
    ]
    assert [body["messages"] for body in server.bodies] == [history[:n] for n in (1, 3, 5, 7)]
    assert all(body["tools"] == run.tools.definitions() and "system" not in body for body in server.bodies)
    assert [command for _, command in run.tools.executed] == [
        {"command": command} for command in ("ls", "fail", "", "pwd", "x")
    ]
    call = ["tool_call", "tool_result"]
    turn = ["request", "response"]
    assert run.types() == ["goal", *turn, *call, *turn, *call, *call, *call, *turn, *turn, *call]
    assert [request.messages for request in run.written(events.Request)] == [
        [FIRST],
        [history[2]],
        [history[4]],
        [NUDGE],
    ]
    assert run.state.messages == [*history, {"role": "assistant", "content": [use("e", command="x")]}]
    assert (run.state.turns, run.state.nudges, run.state.tokens.output) == (4, 1, 4 * 42)


def test_each_request_is_on_disk_with_the_hash_of_its_body_before_it_is_made(run: Run, connect: Connect) -> None:
    lines: list[bytes] = []
    open_requests: list[str] = []
    run.budgets = Budgets(max_turns=2)
    with MessagesServer(say(use("a", command="ls")), say(text("x"))) as server:
        model = connect(server)

        def before() -> None:
            lines.append(run.path.read_bytes().splitlines()[-1])
            open_requests.append("open")

        run.go(model, before_request=before, after_request=lambda: open_requests.append("closed"))
    assert open_requests == ["open", "closed"] * 2
    for line, body in zip(lines, server.bodies, strict=True):
        request = json.loads(line)
        assert request["type"] == "request"
        assert request["sha256"] == body_sha256(model, body["tools"], body["messages"])


def test_the_stop_rule_ends_a_run_inside_a_tool_call(run: Run, connect: Connect) -> None:
    """The call's result is written; no further call of the response is executed, nothing more is asked."""

    def evaluate(command: str) -> None:
        if command == "evaluate":
            stop = StopRun("patience", "3 evaluations in a row without an improvement")
            stop.output = "wrong: output 1"
            raise stop

    run.tools.on_execute = evaluate
    with MessagesServer(
        say(use("a", command="ls"), use("b", command="evaluate"), use("c", command="rm"), stop="tool_use")
    ) as server:
        ending = run.go(connect(server))
    assert isinstance(ending, StopRun) and ending.status == "patience"
    assert run.written(events.ToolResult)[-1].content == "wrong: output 1"
    assert run.types()[-1] == "tool_result" and len(run.tools.executed) == 2 and len(server.seen) == 1


def test_a_rule_that_was_met_before_the_process_died_ends_the_run_at_once(
    run: Run, again: Callable[[], Run], connect: Connect
) -> None:
    """Also calls that were still to be executed are left alone."""
    verdict = {"kind": "wrong", "improved": False, "speedup": None, "counts": True}
    content = [use("a", command="evaluate"), use("b", command="ls")]
    with MessagesServer(say(text("x"))) as server:
        model = connect(server)
        for event in (
            GOAL,
            events.Request(1, [FIRST], body_sha256(model, run.tools.definitions(), [FIRST])),
            events.Response(1, content, "tool_use", {}, "m", "i", None, 1.0),
            events.ToolCall("a", "bash", {"command": "evaluate"}),
            *(events.Evaluation(number, verdict) for number in (1, 2, 3)),
        ):
            run.transcript.write(event)
        run.transcript.close()
        resumed = again()
        ending = resumed.go(model)
    assert isinstance(ending, StopRun) and ending.status == "patience"
    assert server.seen == [] and resumed.tools.executed == []


def test_a_model_that_only_talks_is_given_up(run: Run, connect: Connect) -> None:
    with MessagesServer(say(use("a", command="ls")), say(text("I am done."))) as server:
        ending = run.go(connect(server))
    assert isinstance(ending, StopRun)
    assert (ending.status, ending.detail) == ("talked", "5 responses in a row without a tool call")
    assert len(server.seen) == 1 + TALK and run.state.nudges == TALK - 1
    assert [body["messages"][-1] for body in server.bodies[2:]] == [NUDGE] * (TALK - 1)


@pytest.mark.parametrize("content", [[], [THINKING]])
def test_a_turn_that_says_nothing_is_nudged_and_not_sent_back(run: Run, connect: Connect, content: list[Json]) -> None:
    run.budgets = Budgets(max_turns=2)
    with MessagesServer(say(*content)) as server:
        run.go(connect(server))
    assert server.bodies[1]["messages"] == [FIRST, NUDGE]


def test_a_pause_of_the_server_is_sent_back_unchanged(run: Run, connect: Connect) -> None:
    run.budgets = Budgets(max_turns=2)
    with MessagesServer(say(text("wait"), stop="pause_turn"), say(use("a", command="ls"))) as server:
        run.go(connect(server))
    assert server.bodies[1]["messages"] == [FIRST, {"role": "assistant", "content": [text("wait")]}]


def test_a_call_inside_which_the_response_was_cut_is_answered_with_an_error(run: Run, connect: Connect) -> None:
    whole = message(use("a", command="ls"), use("b", command="cat > x"), stop="max_tokens")
    cut = [event for event in stream_of(whole) if event.get("index") != 1 or event["type"] != "content_block_stop"]
    half = [event for event in cut if 'd": "cat > x"}' not in json.dumps(event.get("delta", {}).get("partial_json"))]
    run.budgets = Budgets(max_turns=2)
    with MessagesServer(Stream(half), say(text("x"))) as server:
        run.go(connect(server))
    assert server.bodies[1]["messages"][-1] == results(
        {"tool_use_id": "a", "content": "ls"}, {"tool_use_id": "b", "content": WORDS.cut, "is_error": True}
    )
    assert run.tools.executed == [("bash", {"command": "ls"})]


@pytest.mark.parametrize(
    ("stop", "error", "words"),
    [
        ("refusal", Refused, r"^the model refused at turn 1 \(frontier_llm: no kernels\)$"),
        ("model_context_window_exceeded", Fatal, "no longer fits the model's context at turn 1"),
        ("a_new_reason", Resumable, "'a_new_reason'"),
    ],
)
def test_responses_that_end_the_run_are_recorded_and_asked_for_again_on_resume(
    run: Run,
    again: Callable[[], Run],
    connect: Connect,
    stop: str,
    error: type[JustgoalError],
    words: str,
) -> None:
    details = {"type": "refusal", "category": "frontier_llm", "explanation": "no kernels"}
    with MessagesServer(say(text("no"), stop=stop, stop_details=details), say(use("a", command="ls"))) as server:
        with pytest.raises(error, match=words):
            raise run.go(connect(server))
        assert run.types() == ["goal", "request", "response"] and len(server.seen) == 1
        resumed = again()
        resumed.budgets = Budgets(max_turns=2)
        resumed.go(connect(server))
    assert server.bodies[0] == server.bodies[1]
    assert [request.messages for request in run.written(events.Request)] == [[FIRST], []]
    assert run.written(events.Response)[0].stop_details == details


def test_retries_are_in_the_transcript_and_half_messages_are_not(run: Run, connect: Connect) -> None:
    run.budgets = Budgets(max_turns=1)
    half = stream_of(message(use("a", command="half"), stop="tool_use"))[:4]
    with MessagesServer(
        Status(529, "overloaded_error", "Overloaded"), Stream(half, "cut"), say(use("b", command="ls"))
    ) as server:
        run.go(connect(server))
    assert run.types() == ["goal", "request", "retry", "retry", "response", "tool_call", "tool_result"]
    assert [(retry.number, retry.attempt, retry.status) for retry in run.written(events.Retry)] == [
        (1, 1, 529),
        (1, 2, None),
    ]
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]
    assert run.tools.executed == [("bash", {"command": "ls"})]


def test_ctrl_c_inside_a_tool_call_and_the_next_process(run: Run, again: Callable[[], Run], connect: Connect) -> None:
    """The call that was under way is answered with an error, and the one after it is executed."""

    def press(command: str) -> None:
        if command == "sleep":
            raise KeyboardInterrupt

    content = [THINKING, use("a", command="ls"), use("b", command="sleep"), use("c", command="pwd")]
    run.tools.on_execute = press
    with MessagesServer(say(*content, stop="tool_use"), say(text("x"))) as server:
        assert isinstance(run.go(connect(server)), KeyboardInterrupt)
        assert run.types()[-1] == "tool_call"
        resumed = again()
        resumed.budgets = Budgets(max_turns=2)
        resumed.go(connect(server))
    assert resumed.tools.executed == [("bash", {"command": "pwd"})]
    assert server.bodies[1]["messages"] == [
        FIRST,
        {"role": "assistant", "content": content},
        results(
            {"tool_use_id": "a", "content": "ls"},
            {"tool_use_id": "b", "content": WORDS.interrupted, "is_error": True},
            {"tool_use_id": "c", "content": "pwd"},
        ),
    ]


def test_ctrl_c_while_a_request_is_open_makes_the_same_request_again(
    run: Run, again: Callable[[], Run], connect: Connect
) -> None:
    def press() -> None:
        if run.state.turns == 1:
            raise KeyboardInterrupt

    with MessagesServer(say(use("a", command="ls"), stop="tool_use"), say(text("x"))) as server:
        assert isinstance(run.go(connect(server), before_request=press), KeyboardInterrupt)
        resumed = again()
        resumed.budgets = Budgets(max_turns=2)
        resumed.go(connect(server))
    requests = run.written(events.Request)
    assert [(request.number, len(request.messages)) for request in requests] == [(1, 1), (2, 1), (2, 0)]
    assert requests[1].sha256 == requests[2].sha256
    assert server.bodies[1]["messages"] == [
        FIRST,
        {"role": "assistant", "content": [use("a", command="ls")]},
        results({"tool_use_id": "a", "content": "ls"}),
    ]


def test_killed_after_any_line_a_run_ends_as_if_undisturbed(tmp_path: Path, connect: Connect) -> None:
    """A kill leaves a prefix of the transcript; but for the call that it interrupts, nothing is different."""
    script = [
        say(THINKING, use("a", command="ls"), use("b", command="pwd"), stop="tool_use"),
        say(text("hm")),
        say(use("c", command="x"), stop="tool_use"),
        say(text("end")),
    ]

    def play(folder: Path, turns_done: int) -> Run:
        run = Run(folder)
        run.budgets = Budgets(max_turns=4)
        with MessagesServer(*script[turns_done:]) as server:
            ending = run.go(connect(server))
        assert isinstance(ending, StopRun) and ending.status == "max_turns"
        return run

    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = play(whole, 0)
    lines = undisturbed.path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines) + 1):
        folder = tmp_path / str(kept)
        folder.mkdir()
        (folder / "events.jsonl").write_bytes(b"".join(lines[:kept]) + b'{"seq":')
        turns = sum(b'"type":"response"' in line for line in lines[:kept])
        run = play(folder, turns)
        interrupted = kept > 0 and b'"type":"tool_call"' in lines[kept - 1]
        expected = json.loads(json.dumps(undisturbed.state.messages))
        if interrupted:
            expected = [message for message in expected if message["role"] == "assistant"]
            assert [message for message in run.state.messages if message["role"] == "assistant"] == expected
            assert WORDS.interrupted in json.dumps(run.state.messages)
        else:
            assert run.state.messages == expected
        assert (run.state.turns, run.state.nudges) == (4, 1)


def test_a_history_that_is_not_what_was_sent_is_not_gone_on_with(
    run: Run, again: Callable[[], Run], connect: Connect
) -> None:
    run.budgets = Budgets(max_turns=1)
    with MessagesServer(say(use("a", command="ls"))) as server:
        run.go(connect(server))
        resumed = again()
        resumed.tools.description = "another shell"
        ending = resumed.go(connect(server))
    assert isinstance(ending, UsageError) and "prompts/tools.json" in str(ending)
    assert len(server.seen) == 1


def test_a_recording_plays_the_same_run_again(run: Run, tmp_path: Path, connect: Connect) -> None:
    run.budgets = Budgets(max_turns=3)
    with MessagesServer(
        say(THINKING, use("a", command="ls"), stop="tool_use"), say(text("x")), say(use("b", command="pwd"))
    ) as server:
        run.go(connect(server))
    replay = tmp_path / "replay"
    replay.mkdir()
    second = Run(replay)
    model = Recorded(str(tmp_path), tmp_path)
    ending = second.go(model)
    model.close()
    assert isinstance(ending, StopRun) and ending.status == "recording_ended"
    assert second.tools.executed == run.tools.executed
    assert second.state.messages[:-1] == run.state.messages
    assert second.state.tokens.output == 0 and second.types()[-1] == "request"


def test_the_watcher_sees_each_step_as_it_happens(run: Run, connect: Connect) -> None:
    run.budgets = Budgets(max_turns=1)
    with MessagesServer(say(use("a", command="ls"))) as server:
        run.tools.on_execute = lambda command: seen.append(run.watched[-1].event)
        seen: list[Event] = []
        run.go(connect(server))
    assert seen == [events.ToolCall("a", "bash", {"command": "ls"})]
    assert run.watched == list(read(run.path))
