"""The transcript: everything that happens in a run, one event a line, each line chained to the one before.

A line is one JSON object in pure ASCII (a terminal shows it harmlessly) without spaces between its members:

    {"seq":17,"time":"2026-11-30T14:22:10.123456Z","type":"tool_call",...payload...,"hash":"<64 hex digits>"}

`seq` counts lines from 1, `type` is the event's class in snake case, the payload is the fields of that
class. `hash` is the last member. Let B be the bytes of the line before `,"hash":` and P the hash of the
previous line as 64 ASCII bytes (nothing for the first line): hash = SHA-256(P + B) in lower-case hex. A
flipped byte, a line added, lost or moved is found at the first line that it touches; lines cut off at the end
only by comparing the last hash, which result.json holds.

A line is on disk (append and fsync, 0.2 to 0.7 ms) before `write` returns. Only that of a tool call takes the next
line's fsync, which is that of its evaluation or its result: what it announces runs on this machine, and ends with it.
A last line without a newline is torn: its writer died before it returned. `Transcript.open` removes it,
`read(strict=True)` reports it.
"""

import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Self

from justgoal.errors import Resumable, UsageError
from justgoal.events import FIELDS, NAMES, TYPES, Event, ToolCall


@dataclass(frozen=True)
class Record:
    """One line: `time` is UTC as in the file, `hash` that of the line."""

    seq: int
    time: str
    event: Event
    hash: str


class TranscriptError(UsageError):
    """A transcript is not what was written: the text names the file and the line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"transcript {path} line {line}: {problem}")


def read(path: Path, strict: bool = False) -> Iterator[Record]:
    """Yield every line, verified, in constant memory; safe while the run is being written.

    A torn last line is passed over, as its writer may be about to complete it; it is an error when `strict`.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read transcript {path}: {error.strerror}") from error
    last = None
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                if strict:
                    raise TranscriptError(path, _next_seq(last), "torn, it does not end with a newline")
                return
            last = _decode(line, last, path)
            yield last


def find_run(run: str, runs: Path) -> Path:
    """The folder of a run that is given by its folder or by its name in `runs`."""
    for folder in (Path(run), runs / run):
        if run and (folder / "events.jsonl").is_file():
            return folder
    raise UsageError(f"no run {run!r}: give a run's name or folder; justgoal looks in {runs.name}/")


class Transcript:
    """An open transcript. It has one writer at a time; `observers` see each record after it is on disk."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.last: Record | None = None
        self.repaired = False
        self._descriptor = descriptor
        self._size = 0
        self._observers: list[Callable[[Record], None]] = []

    @classmethod
    def open(cls, path: Path, *observers: Callable[[Record], None]) -> Self:
        """Create it, or verify what is there and go on; `repaired` says whether a torn last line was removed.

        `observers` see the records that are there already too: `State.apply` thus rebuilds the state.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        transcript = cls(path, descriptor)
        transcript._observers.extend(observers)
        try:
            transcript._lock()
            transcript._replay()
            transcript._repair()
        except BaseException:
            transcript.close()
            raise
        return transcript

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"transcript {self.path} is being written by another process") from error

    def _replay(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._accept(_decode(line, self.last, self.path))
                    self._size += len(line)

    def _repair(self) -> None:
        self.repaired = os.fstat(self._descriptor).st_size > self._size
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # a file that was created now must survive a power cut too
        finally:
            os.close(folder)

    @property
    def last_hash(self) -> str:
        return self.last.hash if self.last else ""

    def watch(self, observer: Callable[[Record], None]) -> None:
        """Let `observer` see every record from now on."""
        self._observers.append(observer)

    def write(self, event: Event) -> None:
        """Append the event; return when it is on disk (see the module) and the observers have seen it.

        Ctrl-C and SIGTERM wait meanwhile, so that file, hash and state never differ. Observers get the event
        as a reader will, parsed from the line. NaN and infinities raise ValueError: they are not JSON.
        """
        time = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        line, digest = _encode(_next_seq(self.last), time, event, self.last_hash)
        record = _parse(line, _next_seq(self.last), digest, self.path)
        with _signals_wait():
            self._append(line, sync=not isinstance(event, ToolCall))
            self._accept(record)

    def _append(self, line: bytes, *, sync: bool) -> None:
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)
            raise Resumable(f"cannot write transcript {self.path}: {error.strerror}") from error
        self._size += len(line)

    def _accept(self, record: Record) -> None:
        self.last = record
        for observer in self._observers:
            observer(record)

    def close(self) -> None:
        """Give up the lock. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _next_seq(last: Record | None) -> int:
    return last.seq + 1 if last else 1


def _encode(seq: int, time: str, event: Event, previous: str) -> tuple[bytes, str]:
    payload = {field.name: getattr(event, field.name) for field in fields(event)}
    members = {"seq": seq, "time": time, "type": NAMES[type(event)], **payload}
    body = json.dumps(members, separators=(",", ":"), allow_nan=False).encode()[:-1]
    digest = sha256(previous.encode() + body).hexdigest()
    return body + f',"hash":"{digest}"}}\n'.encode(), digest


_END = re.compile(rb',"hash":"([0-9a-f]{64})"\}\n\Z')
_END_LENGTH = len(',"hash":""}\n') + 64


def _decode(line: bytes, previous: Record | None, path: Path) -> Record:
    seq = _next_seq(previous)
    end = _END.search(line, max(0, len(line) - _END_LENGTH))
    if end is None:
        raise TranscriptError(path, seq, "it does not end with a hash")
    digest = sha256((previous.hash if previous else "").encode())
    digest.update(memoryview(line)[: end.start()])
    if digest.hexdigest().encode() != end[1]:
        raise TranscriptError(path, seq, "hash does not match")
    return _parse(line, seq, digest.hexdigest(), path)


def _parse(line: bytes, seq: int, digest: str, path: Path) -> Record:
    try:
        members = json.loads(line)
        number, time, name = members.pop("seq"), members.pop("time"), str(members.pop("type"))
        del members["hash"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TranscriptError(path, seq, f"it is no event: {error}") from error
    if number != seq:
        raise TranscriptError(path, seq, f"its seq is {number}")
    if name not in TYPES:
        raise TranscriptError(path, seq, f"unknown event type {name!r}: another version of justgoal wrote it")
    kind = TYPES[name]
    if unknown := members.keys() - FIELDS[kind]:
        raise TranscriptError(path, seq, f"{name} has an unknown field {min(unknown)!r}")
    try:
        return Record(seq, time, kind(**members), digest)
    except TypeError as error:
        raise TranscriptError(path, seq, f"{name} lacks a field: {error}") from error


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Put off SIGINT and SIGTERM to the end of the block; Python handles them in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for waiting in caught:
            signal.raise_signal(waiting)
