"""Somebody who is not root: a user number without an account, a home, a checkout and an interpreter that he may read.

Not a test itself.
"""

import os
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conftest import known

from justgoal.sandboxes import cgroups, staging

NUMBER = 61100
CHECKOUT = Path(__file__).parents[1]
NEEDED = ("justgoal", "prompts", "sandbox", "tests", "pyproject.toml")


class Somebody:
    def __init__(self, place: Path) -> None:
        self.home = place / "home"
        self.checkout = place / "checkout"
        self._runtime = place / "runtime"
        self._site = Path(sysconfig.get_path("purelib"))
        self._python = staging.stage().python
        for folder in (self.home, self._runtime):
            folder.mkdir(mode=0o700)
            os.chown(folder, NUMBER, NUMBER)
        self.checkout.mkdir()
        for name in NEEDED:
            source = CHECKOUT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.checkout / name)
        if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (self._site, *self._site.parents)):
            shutil.copytree(self._site, place / "site", symlinks=True, copy_function=_link)
            self._site = place / "site"
        # A busy machine takes a call of 0.1 ms for none at all; how well he measures is not asked here.
        known(self.home / ".cache", shortest_latency=0.0)

    def run(
        self, *words: str, cwd: Path | None = None, timeout: float = 300, groups: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Python with these words, as him, in these control groups."""
        number = str(NUMBER)
        script = 'for group in $GROUPS_OF_HIS; do echo 0 >"$group/cgroup.procs" || exit 9; done; exec "$@"'
        join = ["bash", "-c", script, "run"]
        become = ["setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--inh-caps=-all",
                  "--bounding-set=-all", "--"]  # fmt: skip
        environment = {
            "ANTHROPIC_API_KEY": "key",
            "CI": os.environ.get("CI", ""),
            "GROUPS_OF_HIS": " ".join(map(str, groups)),
            "HOME": str(self.home),
            "LD_LIBRARY_PATH": str(self._python / "lib"),
            "NO_PROXY": "127.0.0.1",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{self.checkout}:{self._site}",
            "USER": "somebody",
            "XDG_RUNTIME_DIR": str(self._runtime),
        }
        python = [str(self._python / "bin" / "python3"), *words]
        return subprocess.run(
            [*join, *become, *python],
            env=environment,
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    @property
    def neutral(self) -> Path:
        """Where what he stages lies."""
        return Path(f"/var/tmp/justgoal-{NUMBER}")

    def provide(self) -> None:
        """Give him what root has staged: he would copy 1 GB."""
        program = "from justgoal.sandboxes import staging; print(staging.name(staging._packages()))"
        home = self.neutral / "stage"
        shutil.rmtree(self.neutral, ignore_errors=True)  # a killed test's
        shutil.copytree(
            self._python.parent, home / self.run("-c", program).stdout.strip(), symlinks=True, copy_function=_link
        )
        for folder in (self.neutral, home):
            os.chown(folder, NUMBER, NUMBER)
            folder.chmod(0o700)

    def runs(self, pid: int) -> bool:
        """Whether a process is his."""
        try:
            return Path(f"/proc/{pid}").stat().st_uid == NUMBER
        except OSError:
            return False


@contextmanager
def somebody() -> Iterator[Somebody]:
    """Nothing of his is left afterwards."""
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="justgoal-test-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, place)
        place.chmod(0o755)
        user = Somebody(place)
        stack.callback(shutil.rmtree, user.neutral, ignore_errors=True)
        user.provide()
        yield user


@contextmanager
def given_groups() -> Iterator[list[Path]]:
    """Control groups of all kinds that belong to him, as somebody with the right to may give them."""
    parents = set(cgroups.hierarchies().parents.values())
    folders = [parent / f"justgoal-given-{secrets.token_hex(4)}" for parent in parents]
    for folder in folders:
        folder.mkdir()
        for file in (folder, folder / "cgroup.procs", folder / "cgroup.subtree_control"):
            if file.exists():
                os.chown(file, NUMBER, NUMBER)
    try:
        yield folders
    finally:
        for folder in folders:
            for child in (*(path for path in folder.iterdir() if path.is_dir()), folder):
                child.rmdir()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
