"""What is untrusted cannot act on a terminal, and figures and lines look as they are promised to."""

import io
import os
import pty
import re
import select
import time
from pathlib import Path

import pytest

from justgoal import figures
from justgoal.terminal import View, harmless, one_line

HOSTILE = [
    ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
    ("\x1b[2J\x1b[H\x1b[?1049h", r"\x1b[2J\x1b[H\x1b[?1049h"),
    (
        "\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\",
        "\\x1b]8;;http://example.org\\x1b\\link\\x1b]8;;\\x1b\\",
    ),
    ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),
    ("\x1bP1$r0m\x1b\\", "\\x1bP1$r0m\\x1b\\"),
    ("\x1bc\x1b(0", r"\x1bc\x1b(0"),
    ("\x9b31m\x9d0;title\x9c\x90q\x84\x85", r"\x9b31m\x9d0;title\x9c\x90q\x84\x85"),
    ("a\x00b\x07c\x08d\x0be\x0cf\x7fg", r"a\x00b\x07c\x08d\x0be\x0cf\x7fg"),
    ("50 %\r100 %\rdone", r"50 %\r100 %\rdone"),
    ("one\r\ntwo\n\tthree", "one\ntwo\n\tthree"),
    ("[red]no[/red] [/] [link=x] [bold", "[red]no[/red] [/] [link=x] [bold"),
    (":smile: &amp; {x} \\[red]", ":smile: &amp; {x} \\[red]"),
    ("a\u202eb\u202ac\u2066d\u2069e\u200ff\u061c", r"a\u202eb\u202ac\u2066d\u2069e\u200ff\u061c"),
    ("zero\u200bwidth\u200c\u200d\u2060\ufeff\u00ad", r"zero\u200bwidth\u200c\u200d\u2060\ufeff\xad"),
    ("tag\U000e0041 filler\u3164\u115f \u034f \ufe00", r"tag\U000e0041 filler\u3164\u115f \u034f \ufe00"),
    ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
    ("lone \ud800 and \udc9b", r"lone \ud800 and \udc9b"),
    ("2.76x ± 0.9 % · 答案 · émigré · ⚠\ufe0f", "2.76x ± 0.9 % · 答案 · émigré · ⚠\ufe0f"),
]
"""What somebody may write, and how it must look."""


@pytest.mark.parametrize(("written", "shown"), HOSTILE)
def test_harmless_shows_everything_and_does_nothing(written: str, shown: str) -> None:
    assert harmless(written) == shown


def test_one_line_is_one_line() -> None:
    assert one_line("no\n[00:00:01] evaluation 1:\tcorrect\r\n") == r"no\n[00:00:01] evaluation 1:\tcorrect\n"


def test_no_character_of_unicode_gets_through_that_acts() -> None:
    acts = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
    assert not any(acts.search(harmless(chr(code))) for code in range(0x11_0000))


def test_without_a_terminal_lines_are_plain() -> None:
    stream = io.StringIO()
    view = View(stream)
    view.begin(3661)
    with view:
        view.status("model is thinking", evaluation=1)
        view.header(["justgoal run x with y"])
        view.header(["  goal         en"])
        view.line("evaluation 1: correct, 22.4 ms, 2.76x ± 0.9 %, champion; 20 left", style="green")
        view.line("wrong: \x1b[2K[red]\r\n[01:01:01] evaluation 2: correct")
    assert stream.getvalue() == (
        "justgoal run x with y\n"
        "  goal         en\n"
        "\n"
        "[01:01:01] evaluation 1: correct, 22.4 ms, 2.76x ± 0.9 %, champion; 20 left\n"
        "[01:01:01] wrong: \\x1b[2K[red]\n"
        "           [01:01:01] evaluation 2: correct\n"
    )


def test_lines_are_flushed_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8", buffering=1 << 16) as stream:
        View(stream).header(["first"])
        assert (tmp_path / "out").read_text() == "first\n"


class Terminal:
    """A real pseudo terminal to print to, and what arrived on its other side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "160")
        self.master, slave = pty.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (a descriptor; closed below)

    def read(self, until: str = "", seconds: float = 10) -> str:
        """All that has been printed, at least up to `until`."""
        self.stream.flush()
        data, end = b"", time.monotonic() + seconds
        while until.encode() not in data and time.monotonic() < end:
            if select.select([self.master], [], [], 0.05)[0]:
                data += os.read(self.master, 1 << 16)
        while select.select([self.master], [], [], 0.05)[0]:
            data += os.read(self.master, 1 << 16)
        return data.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.close()


def test_on_a_terminal_a_status_line_lives_below_the_lines(terminal: Terminal) -> None:
    view = View(terminal.stream)
    view.begin(728)
    with view:
        view.status("model is thinking", evaluation=4, champion=(4.39, 0.008), left=17, tokens=412_345)
        view.line("evaluation 4: correct", style="green")
        wanted = (
            r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] model is thinking · evaluation 4 · champion 4\.39x ± 0\.8 % · "
            r"17 left · 412k tokens · 00:12:0\d"
        )
        seen = terminal.read(until="tokens")
        assert re.search(wanted, seen)
        assert "[00:12:08] evaluation 4: correct" in seen
        assert re.search(wanted, terminal.read(until="tokens")), "it is drawn again without being asked"
    assert terminal.read().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "gone, and the cursor is back"


@pytest.mark.parametrize("phase", ["judging: timing", "measuring experts"])
def test_nothing_is_drawn_while_something_is_timed(terminal: Terminal, phase: str) -> None:
    with View(terminal.stream) as view:
        view.status("judging: correctness")
        terminal.read(until="correctness")
        view.status(phase)
        terminal.read(until=phase)
        assert terminal.read(until="never", seconds=0.5) == "", "four frames long"
        view.status("model is thinking")
        assert "model is thinking" in terminal.read(until="thinking")


@pytest.mark.parametrize(("written", "shown"), HOSTILE)
def test_on_a_terminal_only_our_own_sequences_arrive(terminal: Terminal, written: str, shown: str) -> None:
    View(terminal.stream).header([written])
    assert terminal.read(until="\n").replace("\r\n", "\n") == shown.expandtabs(8) + "\n"


def test_a_long_line_is_not_cut_for_the_terminal(terminal: Terminal) -> None:
    View(terminal.stream).header(["x" * 500])
    assert terminal.read(until="\n") == "x" * 500 + "\r\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (22.4e-3, "22.4 ms"),
        (128e-6, "128 us"),
        (1.24, "1.24 s"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (0.0996, "99.6 ms"),
        (9.996e-3, "10.0 ms"),
        (75.04, "75.0 s"),
        (480, "480 s"),
        (0.2e-6, "0.20 us"),
        (0, "0.00 us"),
    ],
)
def test_latency(seconds: float, text: str) -> None:
    assert figures.latency(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "resolution", "text"),
    [
        (2.76, 0.009, "2.76x ± 0.9 %"),
        (1.003, 0.009, "1.003x ± 0.9 %"),
        (0.93, None, "0.930x"),
        (12.345, 0.12, "12.35x ± 12 %"),
        (250.4, 0.0005, "250x ± 0.05 %"),
    ],
)
def test_speedup(ratio: float, resolution: float | None, text: str) -> None:
    assert figures.speedup(ratio, resolution) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (950, "950"), (4_210, "4.2k"), (9_951, "10k"), (412_345, "412k"), (999_600, "1.0M")],
)
def test_tokens(count: int, text: str) -> None:
    assert figures.tokens(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00:00"), (11560.9, "03:12:40"), (360_005, "100:00:05"), (-1, "00:00:00")]
)
def test_elapsed(seconds: float, text: str) -> None:
    assert figures.elapsed(seconds) == text


def test_small_figures() -> None:
    assert [figures.error(2.14e-7), figures.amount(1, "turn"), figures.amount(214, "turn")] == [
        "2.1e-07",
        "1 turn",
        "214 turns",
    ]
