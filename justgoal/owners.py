"""What on this host belongs to which runtime: control groups, containers and folders carry its mark.

A runtime that is killed leaves them behind. Whoever starts next, or `justgoal clean`, removes what bears the mark of a
process that no longer exists; nothing else is ever removed.
"""

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from justgoal.errors import Fatal

_MARK = re.compile(r"(\d+)-(\d+)-(\d+)")


def runtime_folder() -> Path:
    """Where this host's runtimes meet; gone after a reboot, as they are."""
    place = Path("/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    return place / "justgoal" if os.access(place, os.W_OK) else private_folder(Path("/tmp"))


def private_folder(parent: Path) -> Path:
    """This user's own folder where everybody may write; raises Fatal when somebody else has made it."""
    folder = parent / f"justgoal-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Fatal(f"{folder} is not yours alone: remove it, or have it removed")
    return folder


def give(file: Path | int, uid: int) -> None:
    """Make `uid` the owner of a path or an open file; what is our own stays so, since only root can give."""
    if uid != os.geteuid():
        os.chown(file, uid, uid)


def mark() -> str:
    """This process's: its process namespace, its number there, and when it started, as numbers are used again."""
    return f"{_namespace()}-{os.getpid()}-{_started(os.getpid())}"


def dead(mark: str) -> bool:
    """Whether the process has ended. Of a mark of another namespace, such as a container's, nothing can be known."""
    parts = _MARK.fullmatch(mark)
    if parts is None:
        return False
    namespace, pid, started = map(int, parts.groups())
    return namespace == _namespace() and _started(pid) != started


def make_folder(kind: str) -> Path:
    """A new empty folder of this process that others may enter, at a path that tells nothing but the mark."""
    home = _folders() / mark()
    home.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=home))
    folder.chmod(0o755)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove one that make_folder made, and this process's own when it was the last in there."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def sweep() -> int:
    """Remove the folders of processes that have ended, and their entries in registries; how many folders there were."""
    for entry in runtime_folder().glob("*/agents/*"):
        if dead(entry.name.lstrip(".").rpartition("-")[0]):
            entry.unlink(missing_ok=True)
    removed = 0
    for home in _folders().glob("*"):
        if dead(home.name):
            removed += len(list(home.iterdir()))
            shutil.rmtree(home, ignore_errors=True)
    return removed


def _folders() -> Path:
    return runtime_folder() / "owned"


def _started(pid: int) -> int:
    """Ticks since boot; 0 when there is no such process, or only its exit status."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if words[0] in "ZX" else int(words[19])


def _namespace() -> int:
    """Our process namespace: numbers of processes mean nothing outside it."""
    return Path("/proc/self/ns/pid").stat().st_ino
