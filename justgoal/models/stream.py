"""The events of a Messages stream, added up to their message: plain dicts, exactly as received.

The SDK's own accumulation is not used: it rebuilds blocks from its types, takes a tool's input that was cut
off for a whole one, and returns a message that ended too early without a word.
"""

import json
from collections import defaultdict
from collections.abc import Iterable

from jiter import from_json

from justgoal.events import Json
from justgoal.models.retrying import AttemptError

TEXT_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
REQUIRED: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "tool_use": {"id": str, "name": str, "input": dict},
}
"""Members without which a block cannot be worked with."""


def assemble(events: Iterable[Json]) -> Json:
    """The whole message; AttemptError where the server reports an error or the message is not whole."""
    try:
        return _assemble(events)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise AttemptError("incomplete", f"malformed stream: {error!r}") from error


def _assemble(events: Iterable[Json]) -> Json:
    message: Json = {}
    parts: dict[tuple[int, str], list[str]] = defaultdict(list)
    stopped = False
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                _extend(message["content"][event["index"]], parts, event["index"], event["delta"])
            case "message_delta":
                message.update(event["delta"])
                message["usage"] = {**message.get("usage", {}), **_given(event.get("usage") or {})}
            case "message_stop":
                stopped = True
            case "error":
                raise AttemptError(event["error"]["type"], event["error"]["message"], status=200)
    if not stopped or message["stop_reason"] is None:
        raise AttemptError("incomplete", "the stream ended before the message did")
    _join(message, parts)
    _check(message)
    return message


def _given(usage: Json) -> Json:
    """Counts of a message_delta replace those of the start; one that is null was not given."""
    return {name: value for name, value in usage.items() if value is not None}


def _extend(block: Json, parts: dict[tuple[int, str], list[str]], index: int, delta: Json) -> None:
    kind = delta["type"]
    if kind in TEXT_DELTAS:
        parts[index, TEXT_DELTAS[kind]].append(delta[TEXT_DELTAS[kind]])
    elif kind == "signature_delta":
        block["signature"] = delta["signature"]
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or []), delta["citation"]]
    else:
        raise AttemptError("unsupported", f"the server streams {kind!r}, unknown to this version", status=200)


def _join(message: Json, parts: dict[tuple[int, str], list[str]]) -> None:
    content = message["content"]
    for (index, member), pieces in parts.items():
        if member != "partial_json":
            content[index][member] = content[index].get(member, "") + "".join(pieces)
        elif text := "".join(pieces):
            cut = message["stop_reason"] == "max_tokens" and index == len(content) - 1
            content[index]["input"] = _cut_input(text) if cut else json.loads(text)


def _check(message: Json) -> None:
    """Raise unless the transcript can hold the message and the loop can work with it."""
    content = message["content"]
    json.dumps(message, allow_nan=False)  # NaN and 1e999 pass for numbers in json.loads
    for member in ("id", "model", "stop_reason"):
        if not isinstance(message[member], str):
            raise TypeError(f"{member} {message[member]!r}")
    for block in content:
        for member, kind in REQUIRED.get(block["type"], {}).items():
            if not isinstance(block[member], kind):
                raise TypeError(f"{block['type']} with {member} {block[member]!r}")
    identities = [block["id"] for block in content if block["type"] == "tool_use"]
    if len(set(identities)) < len(identities):
        raise ValueError("two tool calls with one id")


def _cut_input(text: str) -> Json:
    """What had come of a tool's input that the length limit cut off; nothing where that is unreadable."""
    try:
        begun = from_json(text.encode(), partial_mode="trailing-strings")
    except ValueError:
        return {}
    return begun if isinstance(begun, dict) else {}
