"""What answers: a model behind an API, or the recording of one.

`claude-opus-5-5`   a name for the Anthropic Messages protocol, here or at `--base-url` (models/anthropic.py)
`recorded:RUN`      the responses of an earlier run, in order (models/recorded.py)
"""

import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from justgoal.errors import UsageError
from justgoal.events import Event, Json, Response


class Model(Protocol):
    """`name` and `parameters` define what answers; both go into run.json and the hash of each request."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...

    def query(
        self, number: int, messages: list[Json], tools: list[Json], on_event: Callable[[Event], None]
    ) -> Response:
        """Return turn `number`, whole, and report each Retry on the way; neither list is changed.

        Raises Resumable when no answer can be had now, Fatal when none ever will, StopRun after the last one.
        """

    def close(self) -> None:
        """Let go of connections and files. May be called twice."""


def parse(form: str, *, base_url: str | None, api_key: str | None, runs: Path) -> Model:
    """The model that `--model` names. Nothing is sent yet."""
    kind, colon, rest = form.partition(":")
    if colon and kind == "recorded":
        from justgoal.models.recorded import Recorded

        return Recorded(rest, runs)
    if not form or set(form) & set(string.whitespace) or (colon and base_url is None):
        raise UsageError(
            f"model {form!r} has an unknown form: give an Anthropic-protocol model name such as "
            "claude-opus-5-5, or recorded:RUN"
        )
    key = _checked_key(api_key)
    url = _checked_url(base_url) if base_url else None
    from justgoal.models.anthropic import (
        Anthropic,
    )  # the SDK takes a second to import: not for `justgoal show`

    return Anthropic(form, key, url)


def _checked_key(key: str | None) -> str:
    key = (key or "").strip()
    if not key:
        raise UsageError("no API key: set ANTHROPIC_API_KEY (any value for a local --base-url)")
    if not (key.isascii() and key.isprintable()):
        raise UsageError("ANTHROPIC_API_KEY holds characters that no API key has: set it again")
    return key


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete:
        raise UsageError(f"--base-url {url!r} is no address of a server: give one such as http://localhost:8000")
    return url
