"""The transcript: round trip, hash chain, torn and altered lines, one writer, signals, full disk."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from justgoal import events
from justgoal.errors import UsageError
from justgoal.transcript import Record, Transcript, TranscriptError, find_run, read

NASTY = 'a \x1b[31mred\x1b]0;title\x07 [red] \u202e \ud800 \U0001f600 line\nbreak \x00 ,"hash":""}'
EXAMPLES: list[events.Event] = [
    events.RunStarted({"task": "top_k_select/long", "versions": {"torch": "2.13.0"}}),
    events.Goal(NASTY, "en", "ab"),
    events.Request(1, [{"role": "user", "content": [{"type": "text", "text": NASTY}]}], "cd"),
    events.Retry(1, 1, "overloaded_error: Overloaded", 529, 2.5, "req_1"),
    events.Response(
        1,
        [{"type": "thinking", "thinking": "", "signature": "c2ln"}, {"type": "text", "text": NASTY}],
        "tool_use",
        {"input_tokens": 3, "cache_read_input_tokens": None},
        "some-model",
        "msg_1",
        None,
        1.25,
    ),
    events.ToolCall("toolu_1", "bash", {"command": NASTY}),
    events.ToolResult("toolu_1", NASTY, False, 0.01),
    events.EvaluationStarted(1, "ef", {"solution.py": "01"}),
    events.Evaluation(1, {"number": 1, "kind": "correct", "speedup": 2.76, "ratios": [1.0, None]}),
    events.Champion(1, 2.76),
    events.SandboxLost("killed"),
    events.Paused("Ctrl-C"),
    events.Resumed("the same command"),
    events.Final({"kind": "correct"}, 1),
    events.Stopped("patience", "20 evaluations in a row without an improvement"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *written: events.Event) -> None:
    transcript = Transcript.open(path)
    for event in written:
        transcript.write(event)
    transcript.close()


def test_every_event_comes_back_as_it_was(path: Path) -> None:
    assert {type(event) for event in EXAMPLES} == set(events.TYPES.values())
    write(path, *EXAMPLES)
    assert [record.event for record in read(path, strict=True)] == EXAMPLES
    assert [record.seq for record in read(path)] == list(range(1, len(EXAMPLES) + 1))


def test_lines_are_ascii_json_with_the_documented_hash(path: Path) -> None:
    write(path, *EXAMPLES)
    previous = ""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        members = json.loads(line.decode("ascii"))
        assert list(members)[:3] == ["seq", "time", "type"] and list(members)[-1] == "hash"
        assert members["seq"] == number and members["time"].endswith("Z")
        body = line[: -len(f',"hash":"{members["hash"]}"}}')]
        assert members["hash"] == sha256(previous.encode() + body).hexdigest()
        assert not any(byte < 32 or byte > 126 for byte in line)
        previous = members["hash"]


def test_a_transcript_goes_on_where_it_ended_and_observers_see_all(path: Path) -> None:
    write(path, *EXAMPLES[:5])
    seen: list[Record] = []
    later: list[Record] = []
    transcript = Transcript.open(path, seen.append)
    assert not transcript.repaired and transcript.last_hash == seen[-1].hash
    transcript.watch(later.append)
    transcript.write(EXAMPLES[5])
    transcript.close()
    assert [record.event for record in seen] == EXAMPLES[:6]
    assert later == seen[5:] == list(read(path))[5:]


def test_observers_get_what_a_reader_will(path: Path) -> None:
    content = [{"type": "text", "text": "before"}]
    seen: list[Record] = []
    transcript = Transcript.open(path, seen.append)
    transcript.write(events.Request(1, content, "ab"))
    content[0]["text"] = "changed by the caller afterwards"
    transcript.close()
    assert seen == list(read(path))


def test_a_flipped_byte_anywhere_is_found_at_its_line(path: Path) -> None:
    write(path, *EXAMPLES[:4])
    whole = path.read_bytes()
    for position in range(len(whole)):
        altered = bytearray(whole)
        altered[position] ^= 1
        path.write_bytes(altered)
        line = whole[:position].count(b"\n") + 1
        with pytest.raises(TranscriptError, match=rf"^transcript {path} line {line}: "):
            list(read(path, strict=True))


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (
            lambda lines: [lines[0], lines[1].replace(b'"language":"en"', b'"language":"zh"'), lines[2]],
            "line 2: hash does not match",
        ),
        (lambda lines: [lines[0], lines[2]], "line 2: hash does not match"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2: hash does not match"),
        (lambda lines: [lines[0], b"\n", *lines[1:]], "line 2: it does not end with a hash"),
        (lambda lines: [lines[0], lines[1], lines[2][:-1]], "line 3: torn, it does not end with a newline"),
    ],
)
def test_altered_lines(path: Path, alter: Callable[[list[bytes]], list[bytes]], problem: str) -> None:
    write(path, *EXAMPLES[:3])
    path.write_bytes(b"".join(alter(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(UsageError) as caught:
        list(read(path, strict=True))
    assert str(caught.value) == f"transcript {path} {problem}"


def chained(body: str) -> bytes:
    return f'{body},"hash":"{sha256(body.encode()).hexdigest()}"}}\n'.encode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            '{"seq":1,"time":"t","type":"party"',
            "unknown event type 'party': another version of justgoal wrote it",
        ),
        (
            '{"seq":1,"time":"t","type":["goal"]',
            "unknown event type \"['goal']\": another version of justgoal wrote it",
        ),
        ('{"seq":2,"time":"t","type":"paused","reason":"x"', "its seq is 2"),
        ('{"seq":1,"time":"t","type":"paused","reason":"x","extra":1', "paused has an unknown field 'extra'"),
        ('{"seq":1,"time":"t"', "it is no event: 'type'"),
    ],
)
def test_lines_that_no_version_of_this_package_wrote(path: Path, body: str, problem: str) -> None:
    path.write_bytes(chained(body))
    with pytest.raises(TranscriptError) as caught:
        Transcript.open(path)
    assert str(caught.value) == f"transcript {path} line 1: {problem}"


def test_a_missing_field_is_named(path: Path) -> None:
    path.write_bytes(chained('{"seq":1,"time":"t","type":"stopped","status":"patience"'))
    with pytest.raises(TranscriptError, match=r"line 1: stopped lacks a field: .*'detail'"):
        list(read(path))


def test_a_torn_last_line_is_removed_by_the_next_writer_only(path: Path) -> None:
    write(path, *EXAMPLES[:3])
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) - 40, whole.rindex(b'{"seq":3') + 1):
        path.write_bytes(whole[:kept])
        assert [record.seq for record in read(path)] == [1, 2]
        with pytest.raises(TranscriptError, match="line 3: torn"):
            list(read(path, strict=True))
        assert len(path.read_bytes()) == kept
    transcript = Transcript.open(path)
    assert transcript.repaired
    transcript.write(EXAMPLES[2])
    transcript.close()
    assert [record.event for record in read(path, strict=True)] == EXAMPLES[:3]


def test_one_writer_at_a_time(path: Path) -> None:
    transcript = Transcript.open(path)
    with pytest.raises(UsageError, match="is being written by another process"):
        Transcript.open(path)
    transcript.close()
    transcript.close()
    Transcript.open(path).close()


def test_what_json_lacks_is_not_written(path: Path) -> None:
    transcript = Transcript.open(path)
    with pytest.raises(ValueError):
        transcript.write(events.Champion(1, float("nan")))
    transcript.write(events.Champion(1, 1.5))
    transcript.close()
    assert [record.seq for record in read(path, strict=True)] == [1]


# In a process of its own: the limit would meet every file of ours, the one that pytest's output goes to included.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from justgoal import events
from justgoal.errors import Resumable
from justgoal.transcript import Transcript

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
transcript = Transcript.open(Path(sys.argv[1]))
transcript.write(events.RunStarted({}))
try:
    transcript.write(events.ToolResult("toolu_1", "x" * 5000, False, 0.1))
except Resumable as error:
    print(error)
transcript.write(events.Paused("disk full"))
transcript.close()
"""


def test_a_full_disk_stops_resumably_and_leaves_whole_lines(path: Path) -> None:
    """Files that may not grow beyond 4 KiB: a write ends short, then fails, as on a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(f"cannot write transcript {path}: File too large")
    assert [record.seq for record in read(path, strict=True)] == [1, 2]


def test_ctrl_c_at_any_moment_leaves_file_and_memory_alike(path: Path) -> None:
    seen: list[Record] = []
    transcript = Transcript.open(path, seen.append)
    armed, interrupts, stop = False, 0, threading.Event()

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def press() -> None:
        while not stop.wait(0.0007):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=press)
    thread.start()
    while interrupts < 100:
        try:
            armed = True
            while True:
                transcript.write(EXAMPLES[3])
        except KeyboardInterrupt:
            interrupts += 1
    stop.set()
    thread.join()
    signal.signal(signal.SIGINT, before)
    transcript.close()
    assert list(read(path, strict=True)) == seen


def test_a_killed_writer_loses_no_acknowledged_line(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from justgoal import events, transcript\n"
        "t = transcript.Transcript.open(Path(sys.argv[1]))\n"
        "while True:\n    t.write(events.Paused('x' * 3000)); print(t.last.seq, flush=True)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            acknowledged = [process.stdout.readline() for _ in range(20)]
            process.kill()
            acknowledged += process.stdout.readlines()
        assert len(list(read(path))) >= int(acknowledged[-1])


def test_reading_needs_constant_memory(path: Path) -> None:
    """A reader of 20 MB holds no more than a few lines of it."""
    script = (
        "import sys, tracemalloc; from pathlib import Path; from justgoal import transcript\n"
        "tracemalloc.start()\n"
        "n = sum(1 for _ in transcript.read(Path(sys.argv[1]), strict=True))\n"
        "print(n, tracemalloc.get_traced_memory()[1])\n"
    )
    write(path, *(events.ToolResult("t", "x" * 100_000, False, 0.0) for _ in range(200)))
    output = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=True).stdout
    lines, peak = map(int, output.split())
    assert lines == 200 and peak < 2_000_000


def test_runs_are_found_by_folder_and_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    write(folder / "events.jsonl", EXAMPLES[0])
    assert find_run("first", tmp_path / "runs") == find_run(str(folder), tmp_path / "nowhere") == folder
    for missing in ("abc", ""):
        with pytest.raises(UsageError) as caught:
            find_run(missing, tmp_path / "runs")
        assert str(caught.value) == f"no run {missing!r}: give a run's name or folder; justgoal looks in runs/"


def test_a_transcript_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read transcript .*: No such file or directory"):
        list(read(tmp_path / "events.jsonl"))
