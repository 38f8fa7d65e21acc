"""A wheel holds everything that the command needs besides its dependencies, and finds it."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSIDE = {"prompts": "_prompts", "sandbox": "_sandbox"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that hatchling makes of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder / "unpacked")
    return folder / "unpacked"


def in_wheel(wheel: Path, folder: Path, program: str) -> str:
    """What a program prints that imports justgoal from the wheel, far from the checkout."""
    prelude = f"import sys; sys.path.insert(0, {str(wheel)!r}); "
    done = subprocess.run(
        [sys.executable, "-c", prelude + program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its relative path, without caches."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    return {path.as_posix(): (folder / path).read_bytes() for path in kept}


@pytest.mark.parametrize("folder", INSIDE)
def test_the_wheel_has_the_files_beside_the_package(wheel: Path, folder: str) -> None:
    wanted = contents(ROOT / folder)
    assert wanted and contents(wheel / "justgoal" / INSIDE[folder]) == wanted


def test_resources_finds_them_there(wheel: Path, tmp_path: Path) -> None:
    program = (
        "from justgoal import resources as r; print(r.prompts(), r.sandbox_files(), r.runs(), sep='\\n');"
        "print(len(r.notices()))"
    )
    prompts, sandbox, runs, notices = in_wheel(wheel, tmp_path, program).splitlines()
    inside = wheel / "justgoal"
    assert [Path(prompts), Path(sandbox), Path(runs)] == [
        inside / "_prompts",
        inside / "_sandbox",
        tmp_path / "runs",
    ]
    assert int(notices) > 0


def test_the_catalogue_is_in_it(wheel: Path, tmp_path: Path) -> None:
    program = "from justgoal.tasks import contract as c; print(*[c.task(name).sha256 for name in c.names()])"
    assert in_wheel(wheel, tmp_path, program) == in_wheel(ROOT, tmp_path, program)


def test_it_is_typed_licensed_and_has_the_command(wheel: Path) -> None:
    (info,) = wheel.glob("*.dist-info")
    assert (wheel / "justgoal" / "py.typed").is_file()
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "justgoal = justgoal.cli:main" in (info / "entry_points.txt").read_text()
    assert not [path for path in contents(wheel) if path.startswith(("tests/", "runs/", "benchmarks/"))]


def test_constraints_name_every_direct_dependency() -> None:
    """What `make setup` installs is what was tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {text.split(">")[0].split("=")[0].split("<")[0].strip() for text in direct}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert {line.split("==")[0] for line in lines if not line.startswith("#")} == names
