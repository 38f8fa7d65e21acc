"""A real HTTP server that speaks the Messages protocol from a script, and misbehaves where that says so.

Not a test itself: test_models.py and test_agent.py drive the real SDK against it.
"""

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

Json = dict[str, Any]


@dataclass(frozen=True)
class Status:
    """An answer with a status other than 200."""

    code: int
    type: str = "api_error"
    message: str = "something is wrong"
    headers: dict[str, str] = field(default_factory=dict)
    details: Json | None = None

    def body(self) -> bytes:
        error = {"type": self.type, "message": self.message, "details": self.details}
        return json.dumps({"type": "error", "error": error}).encode()


@dataclass(frozen=True)
class Stream:
    """Events, then how the stream goes on: it ends, is cut, or lives on with nothing but silence or noise."""

    events: Sequence[Json]
    ending: Literal["end", "cut", "silence", "pings", "comments"] = "end"


@dataclass(frozen=True)
class Seen:
    path: str
    headers: dict[str, str]
    body: Json


def message(*content: Json, stop: str | None = "end_turn", **more: Any) -> Json:
    """A whole message as the API gives it."""
    usage = {
        "input_tokens": 11,
        "output_tokens": 1,
        "cache_read_input_tokens": 100,
        "service_tier": "standard",
    }
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "served-model", "usage": usage}
    return {**head, "content": list(content), "stop_reason": stop, "stop_sequence": None, **more}


def stream_of(whole: Json) -> list[Json]:
    """The events that a server sends for a message, every text in two pieces."""
    start = {**whole, "content": [], "stop_reason": None}
    events: list[Json] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(whole["content"]):
        begin, deltas = _pieces(block)
        events.append({"type": "content_block_start", "index": index, "content_block": begin})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence", "stop_details") if name in whole}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 42, "input_tokens": None}})
    return [*events, {"type": "message_stop"}]


def _pieces(block: Json) -> tuple[Json, list[Json]]:
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": part} for part in _halves(block["text"])]
        case "thinking":
            parts = [{"type": "thinking_delta", "thinking": part} for part in _halves(block["thinking"])]
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [*parts, signature]
        case "tool_use":
            parts = _halves(json.dumps(block["input"], ensure_ascii=False))
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block, []


def _halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]] if text else []


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def use(identity: str, name: str = "bash", **arguments: Any) -> Json:
    return {"type": "tool_use", "id": identity, "name": name, "input": arguments}


def say(*content: Json, stop: str = "end_turn", **more: Any) -> Stream:
    return Stream(stream_of(message(*content, stop=stop, **more)))


class MessagesServer:
    """Serves `script` in order, the last reply over and over; `seen` has every request."""

    def __init__(self, *script: Status | Stream, port: int = 0) -> None:
        self.script = list(script)
        self.seen: list[Seen] = []
        self.released = threading.Event()
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01))

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[Json]:
        return [seen.body for seen in self.seen]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: MessagesServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script, seen = self.server_of.script, self.server_of.seen
        reply = script[min(len(seen), len(script) - 1)]
        seen.append(Seen(self.path, dict(self.headers), body))
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has gone, as some of the tests make it do
            self._status(reply) if isinstance(reply, Status) else self._stream(reply)

    def _status(self, reply: Status) -> None:
        self.send_response(reply.code)
        for name, value in {
            "request-id": "req_status",
            "content-type": "application/json",
            **reply.headers,
        }.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(reply.body())))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(reply.body())

    def _stream(self, reply: Stream) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("request-id", "req_stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")
        self.end_headers()
        for event in reply.events:
            self._send(f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n")
        noise = {"pings": 'event: ping\ndata: {"type": "ping"}\n\n', "comments": ": still here\n\n"}
        while reply.ending in noise and not self.server_of.released.wait(0.02):
            self._send(noise[reply.ending])
        if reply.ending == "silence":
            self.server_of.released.wait(20)
        if reply.ending == "end":
            self._send("")

    def _send(self, piece: str) -> None:
        data = piece.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()
