"""Takes a copy of a solution's files out of a folder that its author can write to.

Nothing is opened by a path: every folder and file is opened relative to its parent's descriptor, without following
links and without blocking, so that neither a swapped link nor a FIFO can lead or hold the runtime. `__pycache__`
stays behind.
"""

import ast
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SIZE_CAP = 64 << 20
FILES_CAP = 10_000
TOO_MANY = f"it has more than {FILES_CAP} files and folders"
PATH_CAP = 512
"""Bytes: of a longer path the copy could not be opened again, and a deeper one would exhaust frames or descriptors."""
ENTRY = "solution.py"
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class InvalidSolution(Exception):
    """The folder is no solution; the text says what is wrong with which file."""


@dataclass(frozen=True)
class Solution:
    """A solution's files by path, each with its bytes."""

    contents: dict[str, bytes]

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of every file, by its path."""
        return {path: hashlib.sha256(data).hexdigest() for path, data in sorted(self.contents.items())}

    @property
    def sha256(self) -> str:
        """Of all paths and contents: the same files have the same hash wherever they came from."""
        listing = "".join(f"{digest}  {path}\n" for path, digest in self.files.items())
        return hashlib.sha256(listing.encode()).hexdigest()

    def mentions_run(self) -> bool:
        """Whether solution.py gives the name `run` a meaning anywhere, as far as that can be read off its text."""
        try:
            tree = ast.parse(self.contents[ENTRY])
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return True  # building it says more
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == "run":
                return True
            if isinstance(node, ast.Name) and node.id == "run":
                return True
            if isinstance(node, ast.alias) and (node.asname or node.name) in ("run", "*"):
                return True
        return False

    def tar(self) -> bytes:
        """A tar file in which nothing but names, contents and a fixed time appears."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, data in sorted(self.contents.items()):
                item = tarfile.TarInfo(path)
                item.size, item.mtime, item.mode = len(data), 1_000_000_000, 0o755
                archive.addfile(item, io.BytesIO(data))
        return buffer.getvalue()

    def write(self, folder: Path) -> None:
        for path, data in self.contents.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def collect(folder: Path) -> Solution:
    """Copy the regular files below `folder`; raises InvalidSolution for anything else, or too much of it."""
    try:
        root = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise InvalidSolution(f"there is no folder {folder.name}") from None
    except NotADirectoryError:
        raise InvalidSolution(f"{folder.name} is not a folder") from None
    except OSError as error:
        raise InvalidSolution(f"{folder.name} cannot be opened: {error.strerror}") from None
    return _solution(root)


def _solution(root: int) -> Solution:
    contents: dict[str, bytes] = {}
    room = SIZE_CAP
    try:
        for count, (path, data) in enumerate(_walk(root, ""), start=1):
            if count > FILES_CAP:
                raise InvalidSolution(TOO_MANY)
            if data is None:
                continue
            contents[path] = data
            room -= len(data)
            if room < 0:
                raise InvalidSolution(f"its files take more than {SIZE_CAP >> 20} MB")
    finally:
        os.close(root)
    if ENTRY not in contents:
        raise InvalidSolution(f"it has no {ENTRY}")
    return Solution(contents)


def _walk(folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    """Every file with its bytes, and every folder with None before what is in it."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, FILES_CAP + 1)]
    if len(names) > FILES_CAP:
        raise InvalidSolution(TOO_MANY)
    for name in sorted(names):
        path = f"{prefix}{name}"
        if name == "__pycache__":
            continue
        if not name.isprintable():
            raise InvalidSolution(f"{path!r} has characters in its name that cannot be printed")
        if len(os.fsencode(path)) > PATH_CAP:
            raise InvalidSolution(f"a path in it is longer than {PATH_CAP} bytes")
        try:
            descriptor = os.open(name, _FLAGS, dir_fd=folder)
        except OSError:
            raise InvalidSolution(f"{path} is {_what(folder, name)}: only regular files and folders") from None
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                yield path, None
                yield from _walk(descriptor, f"{path}/")
            elif stat.S_ISREG(mode):
                yield path, _read(descriptor, path)
            else:
                raise InvalidSolution(f"{path} is {_what(folder, name)}: only regular files and folders")
        finally:
            os.close(descriptor)


def _read(descriptor: int, path: str) -> bytes:
    data = b""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        data = file.read(SIZE_CAP + 1)
    if len(data) > SIZE_CAP:
        raise InvalidSolution(f"{path} is larger than {SIZE_CAP >> 20} MB")
    return data


def _what(folder: int, name: str) -> str:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return "gone"
    kinds = {
        stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device", stat.S_IFCHR: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "not readable")
