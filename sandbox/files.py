"""The file tool's actions, done by a child of PID 1 inside the agent's sandbox, as the agent's user.

Contents are bytes throughout: nothing is recoded, and line ends stay as they are. An answer names a notice
(prompts/notices.toml holds the words) and its fields, and may come with text.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = 10 << 20  # bytes of the largest file that is viewed or edited
VIEW = 32 << 10  # bytes of the longest view
ENTRIES = 500  # of a folder
Message = dict[str, Any]


class ActionError(Exception):
    """A file action that cannot be done: the name of a notice, and what it mentions."""

    def __init__(self, notice: str, **fields: object) -> None:
        super().__init__(notice)
        self.answer: Message = {"ok": False, "notice": notice, **fields}


def act(request: Message) -> tuple[Message, bytes]:
    """One file action; the answer names a notice and its fields, or comes with text."""
    path = Path(request["path"])
    actions: dict[str, Callable[[Path, Message], tuple[Message, bytes]]] = {
        "view": view,
        "create": create,
        "str_replace": replace,
        "insert": insert,
    }
    try:
        return actions[request["command"]](path, request)
    except ActionError as failure:
        return failure.answer, b""
    except FileNotFoundError:
        return {"ok": False, "notice": "file_missing", "path": str(path)}, b""
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            return {"ok": False, "notice": "file_special", "path": str(path)}, b""
        reason = getattr(error, "strerror", None) or str(error)
        return {"ok": False, "notice": "file_error", "path": str(path), "reason": reason}, b""


def view(path: Path, request: Message) -> tuple[Message, bytes]:
    if path.is_dir():
        return view_folder(path)
    lines = split(read(path))
    first, last = request.get("view_range") or (1, -1)
    last = len(lines) if last == -1 else min(last, len(lines))
    if not 1 <= first <= max(last, 1):
        raise ActionError("file_range", path=str(path), lines=len(lines))
    shown, size = [], 0
    for number in range(first, last + 1):
        line = lines[number - 1].removesuffix(b"\n")
        shown.append(b"%6d\t%s" % (number, line if len(line) <= VIEW // 2 else line[: VIEW // 2] + b"..."))
        size += len(shown[-1]) + 1
        if size > VIEW and number < last:
            note = {"notice": "view_cut", "first": first, "last": number, "lines": len(lines)}
            return {"ok": True, **note}, b"\n".join(shown)
    if not shown:
        return {"ok": True, "notice": "file_empty", "path": str(path)}, b""
    return {"ok": True}, b"\n".join(shown)


def view_folder(path: Path) -> tuple[Message, bytes]:
    """Two levels, without hidden names; folders end in a slash."""
    found: list[bytes] = []

    def visit(folder: Path, depth: int) -> None:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.startswith(".") or len(found) > ENTRIES:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            found.append(os.fsencode(entry.path) + (b"/" if is_folder else b""))
            if is_folder and depth < 2:
                visit(Path(entry.path), depth + 1)

    visit(path, 1)
    text = b"\n".join([os.fsencode(str(path).rstrip("/") + "/"), *found[:ENTRIES]])
    cut = {"notice": "folder_cut", "entries": ENTRIES} if len(found) > ENTRIES else {}
    return {"ok": True, **cut}, text


def create(path: Path, request: Message) -> tuple[Message, bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, request["file_text"].encode(errors="replace"))
    return {"ok": True, "notice": "file_created", "path": str(path)}, b""


def replace(path: Path, request: Message) -> tuple[Message, bytes]:
    content = read(path)
    old, new = (request.get(name, "").encode(errors="replace") for name in ("old_str", "new_str"))
    times = content.count(old)
    if times != 1:
        lines = [content.count(b"\n", 0, place) + 1 for place in places(content, old)]
        notice = "old_str_missing" if times == 0 else "old_str_repeated"
        raise ActionError(notice, path=str(path), times=times, lines=", ".join(map(str, lines[:20])))
    before = content[: content.index(old)]
    write(path, content.replace(old, new))
    return {"ok": True, "notice": "file_edited", "path": str(path), "line": before.count(b"\n") + 1}, b""


def places(content: bytes, part: bytes) -> Iterator[int]:
    place = content.find(part)
    while place >= 0:
        yield place
        place = content.find(part, place + len(part))


def insert(path: Path, request: Message) -> tuple[Message, bytes]:
    lines = split(read(path))
    after, text = request["insert_line"], request["insert_text"].encode(errors="replace")
    if not 0 <= after <= len(lines):
        raise ActionError("insert_range", path=str(path), lines=len(lines))
    if after and not lines[after - 1].endswith(b"\n"):
        lines[after - 1] += b"\n"
    if not text.endswith(b"\n"):
        text += b"\n"
    write(path, b"".join([*lines[:after], text, *lines[after:]]))
    return {"ok": True, "notice": "file_edited", "path": str(path), "line": after + 1}, b""


def split(content: bytes) -> list[bytes]:
    """Lines with their ends; only a newline ends one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        check(path, os.fstat(descriptor))
        return file.read(FILE)


def write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        check(path, os.fstat(descriptor))
        file.truncate(0)
        file.write(content)


def check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ActionError("file_special", path=str(path))
    if status.st_size > FILE:
        raise ActionError("file_large", path=str(path), size=status.st_size, limit=FILE)
