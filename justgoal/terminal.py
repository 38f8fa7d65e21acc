"""What a user sees of a run: plain lines, and on a terminal one live status line below them.

Models, tools, solutions and transcripts are untrusted: whatever is printed passes through `harmless`, here
and nowhere else, and is never read as markup.
"""

import os
import re
import threading
import time
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from justgoal import figures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.125
"""Seconds between two frames of the status line."""
QUIET = ("judging: timing", "measuring")
"""How phases begin in which the status line stands still: nothing of ours runs beside a measurement."""

_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls, invisible marks (bidi, zero width), surrogates, separators of lines."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0d\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
"""What else shows nothing and is in none of those categories; emoji keep the marks of their look."""


def harmless(text: str) -> str:
    """The text with all that acts on a terminal, reorders or hides made visible: `\\x1b[31m`, `\\u202e`.

    Tabs and newlines are kept; a carriage return before a newline is dropped. No character is lost otherwise.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(character: str) -> str:
    if character in "\t\n":
        return character
    if unicodedata.category(character) in _HARMFUL or _INVISIBLE.match(character):
        return character.encode("unicode_escape").decode("ascii")
    return character


def one_line(text: str) -> str:
    """Harmless, and newlines and tabs are visible too: for places where a second line would pass for ours."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def rich_text(text: str, style: str = "") -> "Text":
    """Untrusted text for rich: harmless, and `[red]` stays what it is."""
    from rich.text import Text

    return Text(harmless(text), style=style)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(stream: TextIO, width: int | None = None) -> "Console":
    """A rich console that interprets nothing and never cuts or wraps what it prints by itself."""
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=is_terminal(stream),
        width=width,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


@dataclass(frozen=True)
class Status:
    """What the status line says; None is not shown."""

    phase: str = "preparing"
    evaluation: int | None = None
    champion: tuple[float, float] | None = None
    left: int | None = None
    tokens: int | None = None

    def sentence(self, seconds: float) -> str:
        """`model is thinking · evaluation 4 · champion 4.39x ± 0.8 % · 17 left · 412k tokens · 00:12:08`"""
        parts = [self.phase]
        if self.evaluation is not None:
            parts.append(f"evaluation {self.evaluation}")
        if self.champion is not None:
            parts.append(f"champion {figures.speedup(*self.champion)}")
        if self.left is not None:
            parts.append(f"{self.left} left")
        if self.tokens is not None:
            parts.append(f"{figures.tokens(self.tokens)} tokens")
        return " · ".join([*parts, figures.elapsed(seconds)])


class View:
    """Prints a run. Without a terminal: plain lines, flushed. With one: the same above a live status line.

    Use as a context manager; `line` and `status` may be called outside of it, then no status line is drawn.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = console(stream) if is_terminal(stream) else None
        self._live: Live | None = None
        self._status = Status()
        self._gap = False
        self._began = time.monotonic()
        self._moving = threading.Event()
        self._closing = threading.Event()
        self._ticker: threading.Thread | None = None

    def begin(self, elapsed: float = 0.0) -> None:
        """Set the clock: the run is `elapsed` seconds old now (more than 0 when it is resumed)."""
        self._began = time.monotonic() - elapsed

    def header(self, lines: Iterable[str]) -> None:
        """Lines of the block that opens a run, as they are; an empty line parts it from the first event."""
        for text in lines:
            self._print(harmless(text))
        self._gap = True

    def line(self, text: str, style: str = "") -> None:
        """One event: `[00:02:41] evaluation 1: correct, ...`; its further lines stand below the first."""
        if self._gap:
            self._print("")
            self._gap = False
        prefix = f"[{figures.elapsed(self._seconds())}] "
        self._print(prefix + harmless(text).replace("\n", "\n" + " " * len(prefix)), style)

    def status(
        self,
        phase: str | None = None,
        *,
        evaluation: int | None = None,
        champion: tuple[float, float] | None = None,
        left: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Change the parts of the status line that are given. `champion` is (speedup, resolution)."""
        old = self._status
        self._status = Status(
            phase=old.phase if phase is None else phase,
            evaluation=old.evaluation if evaluation is None else evaluation,
            champion=old.champion if champion is None else champion,
            left=old.left if left is None else left,
            tokens=old.tokens if tokens is None else tokens,
        )
        if self._live is None:
            return
        if self._status.phase.startswith(QUIET):
            self._moving.clear()
        else:
            self._moving.set()
        self._live.refresh()

    def __enter__(self) -> Self:
        if self._console is None:
            return self
        from rich.live import Live

        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        self._closing.clear()
        self._moving.set()
        self._ticker = threading.Thread(target=self._tick, args=(self._live,), daemon=True)
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is None or self._ticker is None:
            return
        self._closing.set()
        self._moving.set()
        self._ticker.join()
        self._live.stop()
        self._live = self._ticker = None

    def _tick(self, live: "Live") -> None:
        """Draw the next frame while time passes; sleeps without waking in the quiet phase."""
        while self._moving.wait() and not self._closing.wait(FRAME):
            if self._moving.is_set():
                live.refresh()

    def _render(self) -> "Text":
        frame = SPINNER[int(time.monotonic() / FRAME) % len(SPINNER)]
        text = rich_text(f"{frame} {one_line(self._status.sentence(self._seconds()))}", style="dim")
        text.no_wrap, text.overflow = True, "ellipsis"
        return text

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _print(self, text: str, style: str = "") -> None:
        if self._console is not None:
            self._console.print(rich_text(text, style))
        else:
            self._stream.write(text + "\n")
            self._stream.flush()
