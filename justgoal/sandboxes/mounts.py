"""What every sandbox sees of the host: an allow-list. What is not named here does not exist inside.

Compilers, system libraries, the staged interpreter with torch and numpy (staging.py); no home, no /opt, no
/etc but the linker's cache and the `alternatives` links, no justgoal, no runs, no other packages.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from justgoal import owners
from justgoal.errors import Fatal
from justgoal.sandboxes import Mount, Spec
from justgoal.sandboxes.staging import PYTHON, VENV, Stage, neutral_folder, stage, stage_tree

__all__ = [
    "ACCOUNT",
    "HOME",
    "PATH",
    "Stage",
    "agent_folder",
    "common",
    "environment",
    "existing",
    "first_folder",
    "links",
    "masked",
    "mounts",
    "own_folder",
    "sizes",
    "stage",
    "stage_tree",
    "sweep_workspaces",
    "system",
]

ACCOUNT = "agent"
HOME = "/tmp/home"
PATH = f"{VENV}/bin:/opt/justgoal:/usr/bin:/usr/sbin"
_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "include", "libexec")
_SHARE = ("cmake*", "gcc*", "gdb", "perl", "perl5", "terminfo")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")
_PROCESSORS = Path("/sys/devices/system/cpu")


def mounts(staged: Stage, uid: int) -> list[Mount]:
    """The read-only mounts of every sandbox that is made from this machine's system, parents before children."""
    return [*system(), *common(staged, uid)]


def system() -> list[Mount]:
    """This machine's compilers and libraries."""
    usr = [Path("/usr") / name for name in _USR]
    share = [path for pattern in _SHARE for path in sorted(Path("/usr/share").glob(pattern))]
    folders = (*usr, *share, *_top_level(), *(Path("/etc") / name for name in _ETC))
    return [Mount(path, str(path)) for path in folders if path.exists() and not path.is_symlink()]


def common(staged: Stage, uid: int) -> list[Mount]:
    """What a sandbox gets whatever system it has: who it is, and the staged interpreter with its packages."""
    identity = _identity_files(uid)
    return [
        Mount(_PROCESSORS, str(_PROCESSORS)),
        *(Mount(identity / name, f"/etc/{name}") for name in ("passwd", "group", "hosts", "hostname")),
        Mount(staged.python, PYTHON),
        Mount(staged.venv, VENV),
    ]


def existing(mounts: Sequence[Mount]) -> None:
    """Raise Fatal when one of them has nothing to mount."""
    for mount in mounts:
        if not mount.source.exists():
            raise Fatal(f"cannot mount {mount.source}: it does not exist")


def sizes(spec: Spec) -> dict[str, int]:
    """The tmpfs folders of a sandbox and how large they may become."""
    return {"/tmp": spec.limits.memory // 2, "/dev/shm": spec.limits.memory // 4, **spec.tmpfs}


def first_folder(spec: Spec) -> str:
    """Where its command begins."""
    return "/workspace" if any(mount.target == "/workspace" for mount in spec.mounts) else HOME


def links() -> dict[str, str]:
    """Symbolic links to make: path and where it points. On a merged system /bin is one to usr/bin."""
    candidates = (*_top_level(), *(Path("/usr") / name for name in _USR))
    return {str(path): str(path.readlink()) for path in candidates if path.is_symlink()}


def masked() -> list[str]:
    """Folders inside the mounts that are covered by nothing: the packages of the system's own Python."""
    return [str(path) for path in sorted(Path("/usr/lib").glob("python3*/dist-packages")) if path.is_dir()]


def environment(staged: Stage) -> dict[str, str]:
    """The whole environment of a sandbox, besides what its Spec adds."""
    libraries = {"LD_LIBRARY_PATH": f"{PYTHON}/lib"} if staged.libraries else {}
    return {
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "LOGNAME": ACCOUNT,
        "PATH": PATH,
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "USER": ACCOUNT,
        **libraries,
    }


def agent_folder(run: Path, uid: int) -> Path:
    """The agent's folder of a run: at a neutral place, as a bind shows its origin, and linked as run/workspace."""
    link = run / "workspace"
    if not link.is_symlink():
        folder = neutral_folder() / "workspaces" / secrets.token_hex(8)
        _private(folder.parent)
        _run_of(folder).write_text(str(link.absolute()))
        link.symlink_to(folder)
    folder = link.readlink()
    own_folder(folder, uid)
    return folder


def sweep_workspaces() -> int:
    """Remove the agents' folders whose runs have been removed; how many there were."""
    removed = 0
    for note in (neutral_folder() / "workspaces").glob("*.run"):
        link, folder = Path(note.read_text()), note.with_suffix("")
        if not (link.is_symlink() and link.readlink() == folder):
            shutil.rmtree(folder, ignore_errors=True)
            note.unlink(missing_ok=True)
            removed += 1
    return removed


def _run_of(folder: Path) -> Path:
    """The note beside an agent's folder that says which run's it is."""
    return folder.with_name(folder.name + ".run")


def _private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def own_folder(folder: Path, uid: int) -> None:
    """Make `folder` for a sandbox to write in: owned by `uid`, inside a parent that no other user may enter.

    Only the folder itself is given away; what an earlier run left in it has its owner already.
    """
    _private(folder.parent)
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owners.give(descriptor, uid)
        os.fchmod(descriptor, 0o755)
    finally:
        os.close(descriptor)


def _top_level() -> list[Path]:
    return [Path("/") / name for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")]


def _identity_files(uid: int) -> Path:
    """Staged passwd, group, hosts and hostname that know nobody but root, the sandbox's user and nobody."""
    texts = {
        "passwd": f"root:x:0:0:root:/root:/bin/false\n{ACCOUNT}:x:{uid}:{uid}:{ACCOUNT}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "group": f"root:x:0:\n{ACCOUNT}:x:{uid}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
        "hostname": "sandbox\n",
    }
    made = owners.make_folder("identity")
    try:
        for name, text in texts.items():
            (made / name).write_text(text)
        return stage_tree(made)
    finally:
        owners.remove_folder(made)
