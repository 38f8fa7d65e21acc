"""The Anthropic Messages protocol, through the anthropic SDK: at Anthropic or at any server that speaks it.

Every call streams. The SDK's own retries are off (models/retrying.py has the policy). There is no system
prompt. At Anthropic itself prompt caching is asked for, and summaries of thinking, because transcripts would
show none of it otherwise; other servers get only what every one of them understands.
"""

import email.utils
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx2

from justgoal.events import Event, Json, Response
from justgoal.models.retrying import AttemptError, persist
from justgoal.models.stream import assemble

HOME = "https://api.anthropic.com"
MAX_TOKENS = 32_000
"""Of one response, thinking included."""
IDLE = 180.0
"""Seconds without a byte after which a line is dead. Pings are bytes."""
CEILING = 3600.0
"""Seconds that one call may take at most, however lively its line is."""
CACHE = {"type": "ephemeral", "ttl": "1h"}
"""An hour: writing a kernel and judging it often take more than five minutes, the default."""


class Anthropic:
    """A model behind the Messages API. `sleep`, `idle` and `ceiling` (seconds) are arguments for tests."""

    def __init__(
        self,
        name: str,
        api_key: str,
        base_url: str | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        idle: float = IDLE,
        ceiling: float = CEILING,
    ) -> None:
        self.name = name
        self._at_home = base_url is None or urlsplit(base_url).hostname == urlsplit(HOME).hostname
        self.parameters: Mapping[str, Any] = {"max_tokens": MAX_TOKENS, "stream": True}
        if self._at_home:
            self.parameters = {**self.parameters, "thinking": {"type": "adaptive", "display": "summarized"}}
        self._sleep = sleep
        self._ceiling = ceiling
        self._client = anthropic.Anthropic(
            api_key=api_key,
            base_url=base_url or HOME,
            max_retries=0,
            timeout=anthropic.Timeout(idle, connect=30.0),
        )

    def query(
        self, number: int, messages: list[Json], tools: list[Json], on_event: Callable[[Event], None]
    ) -> Response:
        if self._at_home:
            messages, tools = _marked(messages, tools)
        body = {"model": self.name, **self.parameters, "messages": messages, "tools": tools}
        return persist(lambda: self._attempt(number, body), number, on_event, self._sleep)

    def _attempt(self, number: int, body: Json) -> Response:
        begun = time.monotonic()
        try:
            with self._client.messages.with_streaming_response.create(**body) as answer:
                message = self._receive(answer.http_response)
        except anthropic.APIStatusError as error:
            raise _failed(error) from error
        except (anthropic.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as error:
            cause = error.__cause__ or error
            raise AttemptError("connection", f"{type(cause).__name__}: {cause}") from error
        return Response(
            number,
            message["content"],
            message["stop_reason"],
            message["usage"],
            message["model"],
            message["id"],
            answer.request_id,
            round(time.monotonic() - begun, 3),
            message.get("stop_details"),
        )

    def _receive(self, response: httpx2.Response) -> Json:
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            response.close()

        timer = threading.Timer(self._ceiling, expire)
        timer.daemon = True
        timer.start()
        try:
            return assemble(_events(response))
        except AttemptError as error:
            error.request_id = response.headers.get("request-id")
            raise
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if expired.is_set():
                raise AttemptError("incomplete", f"no whole answer within {self._ceiling:g} s") from error
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        self._client.close()


def _events(response: httpx2.Response) -> Iterator[Json]:
    for sent in anthropic.Stream.raw_events(response):
        if sent.data:
            yield json.loads(sent.data)


def _marked(messages: list[Json], tools: list[Json]) -> tuple[list[Json], list[Json]]:
    """Copies that ask for caching of the tools and of all up to the newest user turn."""
    newest = max(index for index, message in enumerate(messages) if message["role"] == "user")
    *blocks, last = messages[newest]["content"]
    turn = {**messages[newest], "content": [*blocks, {**last, "cache_control": CACHE}]}
    marked_tools = [*tools[:-1], {**tools[-1], "cache_control": CACHE}] if tools else []
    return [*messages[:newest], turn, *messages[newest + 1 :]], marked_tools


def _failed(error: anthropic.APIStatusError) -> AttemptError:
    return AttemptError(
        error.type or type(error).__name__,
        error.api_message or error.message,
        status=error.status_code,
        code=error.error_code,
        request_id=error.request_id,
        wait=_retry_after(error.response.headers),
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from retry-after in either of its forms (a number, a date)."""
    text = headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        date = email.utils.parsedate_tz(text)
        if date is None:
            return None
        seconds = email.utils.mktime_tz(date) - time.time()
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
