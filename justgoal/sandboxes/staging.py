"""A neutral copy of what a sandbox may see of this machine's Python: the interpreter and a few packages.

A bind mount shows its origin in /proc/self/mountinfo, and the interpreter may lie in a folder that only its
owner may enter. So it is staged: hard links (copies across file systems) under one folder whose name says
nothing, built once per interpreter and set of packages, shared by all runs, never changed afterwards.
"""

import csv
import fcntl
import hashlib
import io
import os
import py_compile
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from justgoal import owners
from justgoal.errors import Fatal

PYTHON = "/opt/python"
VENV = "/opt/venv"
PACKAGES = ("torch", "numpy", "triton")
_LAYOUT = "1"
_NOT_STAGED = {"test", "idlelib", "turtledemo", "ensurepip", "site-packages", "dist-packages"}
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Stage:
    """`python` belongs at PYTHON, `venv` at VENV. `libraries`: whether libpython is a shared one."""

    python: Path
    venv: Path
    libraries: bool


def neutral_folder() -> Path:
    """Where everything lies that is mounted into sandboxes: only we write it, and its name, which can be seen inside,
    says no more than a number."""
    return Path("/var/lib/justgoal") if os.geteuid() == 0 else owners.private_folder(Path("/var/tmp"))


def use() -> int:
    """An open lock that says, as long as this process lives, that what is staged is in use."""
    lock = _lock()
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


@contextmanager
def unused() -> Iterator[bool]:
    """Whether no process uses what all runtimes share; if so none begins to until the context ends."""
    lock = _lock()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(lock)


def remove_all() -> None:
    """Remove everything that is staged, finished or not; only where it is unused."""
    for home in ("stage", "trees"):
        shutil.rmtree(neutral_folder() / home, ignore_errors=True)


def _lock() -> int:
    _folder(neutral_folder())
    return os.open(neutral_folder() / ".in-use", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def stage() -> Stage:
    """The staged interpreter and packages of this process, built now if they are not there yet (1 to 2 s)."""
    packages = _packages()
    key = name(packages)
    home = neutral_folder() / "stage"
    if not (home / key).is_dir():
        with _building(home) as (temporary, finish):
            _stage_python(temporary / "python")
            _stage_venv(temporary / "venv", packages)
            finish(key)
    shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))
    return Stage(home / key / "python", home / key / "venv", shared)


def name(packages: list[metadata.Distribution]) -> str:
    """Of what is staged from this interpreter and these packages."""
    return hashlib.sha256("\n".join((_LAYOUT, *_identity(packages))).encode()).hexdigest()[:16]


def stage_tree(source: Path) -> Path:
    """A copy of a small trusted folder for read-only mounts: regular files 0644 or 0755, folders 0755.

    Named by its contents, so that the same folder is copied once and its name tells nothing about its origin.
    Links, special files, hidden names and __pycache__ are left out.
    """
    files = {
        file.relative_to(source): file for file in sorted(source.rglob("*")) if file.is_file() and not file.is_symlink()
    }
    files = {
        name: file
        for name, file in files.items()
        if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
    }
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(f"{name}\0{file.stat().st_mode & 0o100}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    home, key = neutral_folder() / "trees", digest.hexdigest()[:16]
    if not (home / key).is_dir():
        with _building(home) as (temporary, finish):
            for name, file in files.items():
                target = temporary / name
                _folder(target.parent)
                shutil.copyfile(file, target)
                target.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
            finish(key)
    return home / key


class _Finish:
    """Renames the finished temporary folder to its name; another process may have been first."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary

    def __call__(self, key: str) -> None:
        if not (self.temporary.parent / key).is_dir():
            self.temporary.rename(self.temporary.parent / key)


@contextmanager
def _building(home: Path) -> Iterator[tuple[Path, _Finish]]:
    """A temporary folder in `home`, one builder at a time; what a killed builder left behind is removed."""
    try:
        _folder(home)
        lock = os.open(home / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Fatal(f"cannot write {home}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home.glob(".building-*"):
            shutil.rmtree(left)
        temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=home))
        temporary.chmod(0o755)
        try:
            yield temporary, _Finish(temporary)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
    finally:
        os.close(lock)


def _folder(path: Path) -> None:
    """Make it and its missing parents with mode 0755, whatever the umask."""
    if not path.is_dir():
        _folder(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def _packages() -> list[metadata.Distribution]:
    """PACKAGES and all that they require, as far as it is installed for this interpreter.

    Extras count where they are asked for: torch's CUDA libraries are extras of one package that it requires.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [(name, "") for name in PACKAGES], set[tuple[str, str]]()
    while waiting:
        name, extra = waiting.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name == PACKAGES[0]:
                raise Fatal("torch is not installed for this Python: pip install torch") from None
            continue
        for requirement in found[name].requires or ():
            needed, extras, condition = _parsed(requirement)
            if condition in ("", extra):
                waiting += [(needed, one) for one in ("", *extras)]
    return [found[name] for name in sorted(found)]


def _parsed(requirement: str) -> tuple[str, list[str], str]:
    """Name, extras asked for, and the extra that it belongs to: "a[b,c]==1; extra == 'd'" is a, [b, c], d."""
    words = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
    assert words is not None
    condition = re.search(r"""extra == ['"]([^'"]+)['"]""", requirement)
    extras = [extra.strip() for extra in (words[2] or "").split(",") if extra.strip()]
    return words[1], extras, condition[1] if condition else ""


def _identity(packages: list[metadata.Distribution]) -> Iterator[str]:
    """What makes two stages different."""
    interpreter = _interpreter()
    yield f"{interpreter} {sys.version} {interpreter.stat().st_mtime_ns}"
    for package in packages:
        record = package.read_text("RECORD")
        if record is None:
            raise Fatal(f"{package.name} has no list of its files (RECORD): install it with pip")
        yield f"{package.name} {package.version} {hashlib.sha256(record.encode()).hexdigest()}"


def _interpreter() -> Path:
    """The base interpreter, not the link in a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _stage_python(target: Path) -> None:
    base = Path(sys.base_prefix)
    standard_library = Path(sysconfig.get_path("stdlib"))
    library = target / "lib" / _VERSION
    _link(_interpreter(), target / "bin" / _VERSION)
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(_VERSION)
    for file in _walk(standard_library):
        _link(file, library / file.relative_to(standard_library))
    headers = Path(sysconfig.get_path("include", vars={"installed_base": str(base)}))
    if headers.is_dir():
        for file in _walk(headers):
            _link(file, target / "include" / _VERSION / file.relative_to(headers))
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        for file in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so*"):
            _link(file.resolve(), target / "lib" / file.name)
    if base != Path("/usr"):
        for file in library.glob("_sysconfigdata*.py"):
            _relocate(file, str(base))


def _relocate(file: Path, prefix: str) -> None:
    """Python's own record of where it is installed: make it true inside, and silent about this machine."""
    text = file.read_text().replace(prefix, PYTHON)
    file.unlink()
    file.write_text(text)
    file.chmod(0o644)


def _stage_venv(target: Path, packages: list[metadata.Distribution]) -> None:
    site = target / "lib" / _VERSION / "site-packages"
    _folder(site)
    _folder(target / "bin")
    for name in (_VERSION, "python3", "python"):
        (target / "bin" / name).symlink_to(f"{PYTHON}/bin/{_VERSION}")
    version = ".".join(map(str, sys.version_info[:3]))
    configuration = target / "pyvenv.cfg"
    configuration.write_text(f"home = {PYTHON}/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    configuration.chmod(0o644)
    for package in packages:
        root = Path(str(package.locate_file("")))
        for row in csv.reader(io.StringIO(package.read_text("RECORD") or "")):
            file = Path(row[0])
            if _belongs(file) and (root / file).is_file():
                _link(root / file, site / file)
    _compile(site)


def _belongs(name: Path) -> bool:
    """Whether a file of RECORD is staged: scripts and notes about where it came from are not."""
    if name.is_absolute() or ".." in name.parts:
        return False
    return name.suffix != ".pth" and name.name not in ("direct_url.json", "RECORD", "INSTALLER", "REQUESTED")


def _walk(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.is_dir():
            if file.name not in _NOT_STAGED and not file.name.startswith("config-"):
                yield from _walk(file)
        elif file.is_file():
            yield file


def _link(source: Path, target: Path) -> None:
    if not source.stat().st_mode & 0o004:
        raise Fatal(f"sandboxes need {source}, which others may not read: chmod -R o+rX {source.parent}")
    _folder(target.parent)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _compile(site: Path) -> None:
    """Compile what the installer did not: a sandbox cannot, and every start would pay for it."""
    for file in site.rglob("*.py"):
        cache = file.parent / "__pycache__" / f"{file.stem}.{sys.implementation.cache_tag}.pyc"
        if not cache.is_file():
            inside = VENV / file.relative_to(site.parents[2])
            _folder(cache.parent)
            if py_compile.compile(str(file), str(cache), str(inside), quiet=2):
                cache.chmod(0o644)
