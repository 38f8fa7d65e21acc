"""Models: their names, the Messages protocol through the real SDK against a real server, recordings."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from messages_server import MessagesServer, Status, Stream, message, say, stream_of, text, use

from justgoal import events, models
from justgoal.errors import Fatal, JustgoalError, Resumable, StopRun, UsageError
from justgoal.events import Event, Json, Response, Retry
from justgoal.models.anthropic import HOME, Anthropic
from justgoal.models.recorded import Recorded
from justgoal.models.retrying import PATIENCE
from justgoal.transcript import Transcript, TranscriptError

TOOLS: list[Json] = [{"name": "bash", "description": "a shell", "input_schema": {"type": "object"}}]
MESSAGES: list[Json] = [{"role": "user", "content": [{"type": "text", "text": "the goal"}]}]
THINKING = {"type": "thinking", "thinking": "let me see \u2026", "signature": "c2lnbmF0dXJl+/=="}
Ask = Callable[..., tuple[Response, list[Retry]]]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def ask(waits: list[float]) -> Iterator[Ask]:
    """Query a server once, without ever waiting between attempts."""
    opened: list[Anthropic] = []

    def query(server: MessagesServer, **options: Any) -> tuple[Response, list[Retry]]:
        model = Anthropic("some-model", "key", server.url, **{"sleep": waits.append, **options})
        opened.append(model)
        reported: list[Event] = []
        response = model.query(3, MESSAGES, TOOLS, reported.append)
        retries = [event for event in reported if isinstance(event, Retry)]
        assert reported == retries
        return response, retries

    yield query
    for model in opened:
        model.close()


# --- forms ---


def parse(form: str, **options: Any) -> models.Model:
    return models.parse(form, **{"base_url": None, "api_key": "key", "runs": Path("/nowhere/runs"), **options})


@pytest.mark.parametrize(
    ("form", "options", "problem"),
    [
        (
            "recoded:abc",
            {},
            "model 'recoded:abc' has an unknown form: give an Anthropic-protocol model name such as "
            "claude-opus-5-5, or recorded:RUN",
        ),
        (
            "",
            {},
            "model '' has an unknown form: give an Anthropic-protocol model name such as claude-opus-5-5, "
            "or recorded:RUN",
        ),
        ("recorded:abc", {}, "no run 'abc': give a run's name or folder; justgoal looks in runs/"),
        ("recorded:", {}, "no run '': give a run's name or folder; justgoal looks in runs/"),
        ("m", {"api_key": None}, "no API key: set ANTHROPIC_API_KEY (any value for a local --base-url)"),
        ("m", {"api_key": " \n"}, "no API key: set ANTHROPIC_API_KEY (any value for a local --base-url)"),
        ("m", {"api_key": "a\nb"}, "ANTHROPIC_API_KEY holds characters that no API key has: set it again"),
        *(
            (
                "m",
                {"base_url": url},
                f"--base-url {url!r} is no address of a server: give one such as http://localhost:8000",
            )
            for url in ("localhost:8000", "ftp://host", "http://", "http://host:port", "http://[::1")
        ),
    ],
)
def test_forms_that_name_no_model(form: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(form, **options)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("form", "base_url"),
    [("claude-opus-5-5", None), ("qwen3:8b", "http://localhost:1"), ("Qwen/Qwen3", None)],
)
def test_names_of_models(form: str, base_url: str | None) -> None:
    model = parse(form, base_url=base_url)
    assert model.name == form and model.parameters["max_tokens"] == 32_000
    model.close()
    model.close()


def test_parsing_does_not_import_the_sdk() -> None:
    script = "import sys, justgoal.models; sys.exit('anthropic' in sys.modules or 'tenacity' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# --- one call ---


def test_a_response_is_what_the_server_sent_and_the_request_what_was_meant(ask: Ask) -> None:
    content: list[Json] = [
        THINKING,
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "text", "text": "Zwölf \U0001f600", "citations": None},
        {"type": "a_block_of_the_future", "field": {"nested": [1, None]}},
        use("toolu_1", command='echo "1" && \\\n 中文', flag=True, caller={"type": "direct"}),
    ]
    with MessagesServer(say(*content, stop="tool_use")) as server:
        response, retries = ask(server)
    assert response.content == content and retries == []
    assert [list(block) for block in response.content] == [list(block) for block in content]
    assert (response.number, response.stop_reason, response.model) == (3, "tool_use", "served-model")
    assert (response.message_id, response.request_id) == ("msg_1", "req_stream")
    assert response.usage == {
        "input_tokens": 11,
        "output_tokens": 42,
        "cache_read_input_tokens": 100,
        "service_tier": "standard",
    }
    seen = server.seen[0]
    assert seen.path == "/v1/messages" and seen.headers["Authorization"] == "Bearer key"
    assert seen.body == {
        "model": "some-model",
        "max_tokens": 32_000,
        "stream": True,
        "messages": MESSAGES,
        "tools": TOOLS,
    }


def test_content_goes_back_as_it_came(ask: Ask) -> None:
    with MessagesServer(say(THINKING, use("a", x=[1.5, None, "\u202e"]), stop="tool_use")) as server:
        response, _ = ask(server)
        model = Anthropic("some-model", "key", server.url)
        history = [*MESSAGES, {"role": "assistant", "content": response.content}, *MESSAGES]
        model.query(4, history, TOOLS, lambda event: None)
        model.close()
    assert server.bodies[1]["messages"] == history


def test_at_anthropic_the_newest_turn_is_marked_and_the_history_stays_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anthropic's host is reached through a proxy that is our server."""
    marked = {"type": "ephemeral", "ttl": "1h"}
    history = [*MESSAGES, {"role": "assistant", "content": [use("a"), use("b")]}]
    history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": name} for name in "ab"]}]
    with MessagesServer(say(text("ok"))) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        model = Anthropic("some-model", "key", HOME.replace("https", "http"))
        model.query(1, MESSAGES, TOOLS, lambda event: None)
        model.query(2, history, TOOLS, lambda event: None)
        model.close()
    first, second = server.bodies
    assert first["thinking"] == {"type": "adaptive", "display": "summarized"}
    assert first["tools"] == [{**TOOLS[0], "cache_control": marked}]
    assert first["messages"][0]["content"] == [{**MESSAGES[0]["content"][0], "cache_control": marked}]
    assert second["messages"][:2] == history[:2]
    assert second["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "tool_result", "tool_use_id": "b", "cache_control": marked},
    ]
    assert "cache_control" not in repr((history, TOOLS))


def test_a_tool_call_cut_by_the_length_limit_comes_as_far_as_it_got(ask: Ask) -> None:
    whole = stream_of(message(text("so"), use("a", command="echo 1; echo 2", restart=True), stop="max_tokens"))
    cut = [event for event in whole if "restart" not in repr(event)]
    with MessagesServer(Stream(cut)) as server:
        response, retries = ask(server)
    assert response.stop_reason == "max_tokens" and retries == []
    (block,) = [block for block in response.content if block["type"] == "tool_use"]
    assert list(block["input"]) == ["command"] and "echo 1; echo 2".startswith(block["input"]["command"])


@pytest.mark.parametrize("stop", ["refusal", "pause_turn", "model_context_window_exceeded", "a_new_reason"])
def test_every_stop_reason_is_handed_on(ask: Ask, stop: str) -> None:
    details = {"type": "refusal", "category": "frontier_llm", "explanation": "no"}
    with MessagesServer(say(text("x"), stop=stop, stop_details=details)) as server:
        response, _ = ask(server)
    assert (response.stop_reason, response.stop_details) == (stop, details)


# --- failures that are waited out ---

GOOD = stream_of(message(THINKING, use("a", command="ls"), stop="tool_use"))
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
WITHOUT_STOP = [event for event in GOOD if event["type"] not in ("message_delta", "message_stop")]
SHORT_JSON = [event for event in GOOD if '"ls"' not in repr(event)]


def replaced(**changes: Any) -> list[Json]:
    """GOOD with changes to its first tool use."""
    return [
        {**event, "content_block": {**event["content_block"], **changes}}
        if event["type"] == "content_block_start" and event["index"] == 1
        else event
        for event in GOOD
    ]


@pytest.mark.parametrize(
    ("failure", "error", "status", "longest"),
    [
        (Status(429, "rate_limit_error", "slow", {"retry-after": "7"}), "rate_limit_error: slow", 429, 7.7),
        (Status(429, "rate_limit_error", "slow"), "rate_limit_error: slow", 429, 2.2),
        (Status(429, headers={"retry-after": "4233600"}), "api_error: something is wrong", 429, 990),
        (Status(429, headers={"retry-after": "soon"}), "api_error: something is wrong", 429, 2.2),
        (Status(429, headers={"retry-after": "nan"}), "api_error: something is wrong", 429, 2.2),
        (Status(429, headers={"retry-after": "0"}), "api_error: something is wrong", 429, 2.2),
        (Status(529, "overloaded_error", "Overloaded"), "overloaded_error: Overloaded", 529, 2.2),
        (Status(500), "api_error: something is wrong", 500, 2.2),
        (Status(503, "unheard_of", "a\n b\x1b"), "unheard_of: a b\x1b", 503, 2.2),
        (Status(408, "timeout_error", "late"), "timeout_error: late", 408, 2.2),
        (Status(409, "conflict_error", "busy"), "conflict_error: busy", 409, 2.2),
        (Stream(GOOD[:4], "cut"), "connection: RemoteProtocolError: peer closed connection", None, 2.2),
        (Stream([], "cut"), "connection: RemoteProtocolError: peer closed connection", None, 2.2),
        (Stream(WITHOUT_STOP), "incomplete: the stream ended before the message did", None, 2.2),
        (Stream(GOOD[:-1]), "incomplete: the stream ended before the message did", None, 2.2),
        (Stream([]), "incomplete: the stream ended before the message did", None, 2.2),
        (Stream([*GOOD[:5], OVERLOADED]), "overloaded_error: Overloaded", 200, 2.2),
        (Stream(SHORT_JSON), "incomplete: malformed stream: JSONDecodeError", None, 2.2),
        (Stream(GOOD[1:]), "incomplete: malformed stream: KeyError('content')", None, 2.2),
        (Stream(replaced(id=None)), "incomplete: malformed stream: TypeError", None, 2.2),
        (Stream([{"no": "type"}]), "incomplete: malformed stream: KeyError('type')", None, 2.2),
    ],
)
def test_a_failure_is_reported_waited_out_and_the_same_request_made_again(
    ask: Ask, waits: list[float], failure: Status | Stream, error: str, status: int | None, longest: float
) -> None:
    with MessagesServer(failure, Stream(GOOD)) as server:
        response, (retry,) = ask(server)
    assert [block["type"] for block in response.content] == ["thinking", "tool_use"]
    assert len(server.seen) == 2 and server.bodies[0] == server.bodies[1]
    assert retry.error.startswith(error)
    assert (retry.number, retry.attempt, retry.status) == (3, 1, status)
    assert waits == pytest.approx([retry.wait], abs=1e-3) and longest / 1.1 <= retry.wait <= longest
    assert retry.request_id == (None if status is None and "connection" in error else server_id(failure))


def server_id(reply: Status | Stream) -> str:
    return "req_status" if isinstance(reply, Status) else "req_stream"


def test_retry_after_as_a_date(ask: Ask) -> None:
    soon = formatdate(time.time() + 60, usegmt=True)
    with MessagesServer(Status(429, headers={"retry-after": soon}), Stream(GOOD)) as server:
        _, (retry,) = ask(server)
    assert 50 < retry.wait < 70


@pytest.mark.parametrize(
    ("stream", "options", "error"),
    [
        (Stream(GOOD[:3], "silence"), {"idle": 0.2}, "connection: ReadTimeout"),
        (Stream([], "silence"), {"idle": 0.2}, "connection: ReadTimeout"),
        (Stream(GOOD[:3], "pings"), {"ceiling": 0.3}, "incomplete: no whole answer within 0.3 s"),
        (Stream([], "pings"), {"ceiling": 0.3}, "incomplete: no whole answer within 0.3 s"),
        (Stream(GOOD[:3], "comments"), {"ceiling": 0.3}, "incomplete: no whole answer within 0.3 s"),
    ],
)
def test_lines_that_are_dead_or_never_come_to_an_end(
    ask: Ask, stream: Stream, options: dict[str, float], error: str
) -> None:
    with MessagesServer(stream, Stream(GOOD)) as server:
        _, (retry,) = ask(server, **options)
    assert retry.error.startswith(error) and len(server.seen) == 2


def test_a_server_that_is_not_up_yet() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    started: list[MessagesServer] = []

    def start(_: float) -> None:
        started.append(MessagesServer(Stream(GOOD), port=port).__enter__())

    model = Anthropic("some-model", "key", f"http://127.0.0.1:{port}", sleep=start)
    reported: list[Event] = []
    try:
        model.query(1, MESSAGES, TOOLS, reported.append)
    finally:
        model.close()
        for server in started:
            server.__exit__(None, None, None)
    (retry,) = reported
    assert isinstance(retry, Retry) and "refused" in retry.error and retry.status is None


def test_waits_grow_to_five_minutes_and_after_six_hours_the_run_pauses(ask: Ask, waits: list[float]) -> None:
    with (
        MessagesServer(Status(529, "overloaded_error", "Overloaded")) as server,
        pytest.raises(Resumable) as caught,
    ):
        ask(server)
    assert str(caught.value) == (
        "no answer from the model's server for 6 hours, at last overloaded_error: Overloaded; "
        "start the same command to go on"
    )
    for number, wait in enumerate(waits[:10]):
        assert min(2 * 2**number, 300) <= wait <= min(2 * 2**number, 300) * 1.1
    assert PATIENCE <= sum(waits) < PATIENCE + 330 and len(server.seen) == len(waits) + 1


def test_ctrl_c_during_a_wait_comes_through(ask: Ask) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with MessagesServer(Status(529)) as server, pytest.raises(KeyboardInterrupt):
        ask(server, sleep=interrupt)
    assert len(server.seen) == 1


# --- failures that end the run ---


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (Status(400, "invalid_request_error", "prompt is too long"), Fatal, "prompt is too long"),
        (Status(413, "request_too_large", "33 MB"), Fatal, "33 MB"),
        (Status(401, "authentication_error", "invalid key"), Resumable, "does not accept the API key"),
        (Status(403, "permission_error", "not yours"), Resumable, "does not accept the API key"),
        (Status(404, "not_found_error", "model: some-model"), Fatal, "does not know this model or address"),
        (Status(402, "billing_error", "no credit"), Resumable, "no credit"),
        (
            Status(429, "rate_limit_error", "limit", details={"error_code": "enforced_spend_limit_reached"}),
            Resumable,
            "the account cannot pay for more requests",
        ),
        (
            Stream([{"type": "error", "error": {"type": "invalid_request_error", "message": "bad"}}]),
            Fatal,
            "bad",
        ),
        (
            Stream([*GOOD[:3], {"type": "content_block_delta", "index": 0, "delta": {"type": "smell_delta"}}]),
            Fatal,
            "'smell_delta'",
        ),
    ],
)
def test_failures_that_no_waiting_ends(
    ask: Ask, waits: list[float], reply: Status | Stream, error: type[JustgoalError], words: str
) -> None:
    with MessagesServer(reply) as server, pytest.raises(error, match=words) as caught:
        ask(server)
    assert "\n" not in str(caught.value) and waits == [] and len(server.seen) == 1


# --- recordings ---


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    transcript = Transcript.open(folder / "events.jsonl")
    transcript.write(events.RunStarted({"task": "top_k_select/long"}))
    for number, content in enumerate([[use("a", command="ls")], [text("two")], [text("three")]], 1):
        usage = {"input_tokens": 9}
        transcript.write(events.Request(number, [], "h"))
        transcript.write(Response(number, content, "tool_use", usage, "m", f"msg_{number}", "req", 3.5))
    transcript.close()
    return folder


def test_a_recording_answers_in_order_and_then_ends_the_run(recording: Path) -> None:
    model = parse("recorded:first", runs=recording.parent, api_key=None)
    assert isinstance(model, Recorded)
    assert (model.name, model.length, model.run_json) == ("recorded:first", 3, {"task": "top_k_select/long"})
    answers = [model.query(number, MESSAGES, TOOLS, lambda event: None) for number in (1, 2, 3)]
    assert [answer.message_id for answer in answers] == ["msg_1", "msg_2", "msg_3"]
    assert answers[0] == Response(1, [use("a", command="ls")], "tool_use", {}, "m", "msg_1", "req", 0.0)
    with pytest.raises(StopRun) as caught:
        model.query(4, MESSAGES, TOOLS, lambda event: None)
    assert caught.value.status == "recording_ended"
    assert caught.value.detail == "all 3 responses of recorded:first have been played"
    model.close()


def test_a_resumed_replay_begins_where_it_was(recording: Path) -> None:
    model = Recorded(str(recording), Path("/nowhere"))
    assert model.query(3, MESSAGES, TOOLS, lambda event: None).message_id == "msg_3"
    model.close()


def test_an_altered_recording_is_refused_at_the_start(recording: Path) -> None:
    path = recording / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b"three", b"threE"))
    with pytest.raises(TranscriptError, match="line 7: hash does not match"):
        Recorded("first", recording.parent)
