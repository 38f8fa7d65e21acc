"""`justgoal doctor`: its lines, its exit code, and that a sick machine is told what to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CERTIFICATE

from justgoal import __version__, doctor
from justgoal.doctor import Line
from justgoal.evaluation import certificate
from justgoal.evaluation.certificate import Certificate
from justgoal.sandboxes import Engine

PROGRAM = "from justgoal.cli import main; main()"


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "doctor", "--runs", str(folder), *options],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_lines() -> None:
    assert str(Line("ok", "engine", "bubblewrap 0.8.0")) == "ok       engine     bubblewrap 0.8.0"
    assert str(Line("missing", "engine", "bubblewrap is not installed", "apt install bubblewrap")) == (
        "missing  engine     bubblewrap is not installed\n"
        "                    apt install bubblewrap"
    )  # fmt: skip


def test_noise() -> None:
    held = Certificate(**{
        **CERTIFICATE, "spread": 0.0124, "bias": 0.0194, "pairs": 4, "minimum_gain": 0.005, "smallest_gain": 0.018,
        "shortest_latency": 0.00043,
    })  # fmt: skip
    assert [str(line) for line in doctor.noise(held)] == [
        "ok       noise      cpu: the same solution differs by 1.2 % from itself (pair bias 1.9 %)",
        "ok       gains      found from 1.8 %, when 4 pairs of processes all say more than 0.5 %",
        "ok       calls      compared from 430 us: the clock is right within 7.74 us",
    ]


def test_a_noisy_machine_is_told_what_to_do() -> None:
    held = Certificate(**{**CERTIFICATE, "smallest_gain": 0.072, "shortest_latency": 0.0031})
    cure = f"end what else runs here, remove {certificate.file('cpu')} and try again"
    assert [(line.mark, line.name, line.remedy) for line in doctor.noise(held)] == [
        ("ok", "noise", ""), ("weak", "gains", cure), ("weak", "calls", cure),
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "mark", "free"), [("100m", "missing", "0.1"), ("2g", "weak", "2.0")])
def test_little_room(engine: Engine, tmp_path: Path, size: str, mark: str, free: str) -> None:
    """On a small file system, for a folder that does not exist yet."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)], check=True)
    try:
        assert str(doctor.disk(tmp_path / "runs")) == (
            f"{mark:<9}disk       {free} GB free where runs are written\n"
            "                    make room for 5 GB, or write elsewhere: --runs DIR"
        )
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


NO_DOCKER = {"DOCKER_HOST": "unix:///nonexistent.sock"}


def test_quick(engine: Engine, tmp_path: Path) -> None:
    """A healthy machine: every line in its place; a certificate that holds is shown, since that takes no time."""
    done = run(tmp_path, "--quick", **NO_DOCKER)
    assert (done.returncode, done.stderr) == (0, "")
    names = ["engine", "engine", "uid", "device", "clock", "disk", "freezer", "limits", "compiler", "headers"]
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"justgoal {__version__}", ""]
    assert lines[-2:] == ["", "a run is possible here"]
    found = [line.split()[1] for line in lines[2:-2] if not line.startswith(" ")]
    assert found == [*names, "noise", "gains", "calls"]
    for line in (
        f"ok       engine     bubblewrap {engine.version}",
        "weak     engine     no Docker Engine answers at unix:///nonexistent.sock",
        "ok       uid        0 here, 61000 in sandboxes, 61001 for the judge",
        "ok       limits     memory, processes and processor time of every sandbox",
        "ok       gains      found from 1.0 %, when 5 pairs of processes all say more than 0.5 %",
    ):
        assert line in lines
    assert re.search(r"\nok       freezer    control groups version [12], frozen in \S+ [um]s\n", done.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.docker
def test_quick_as_json(engine: Engine, tmp_path: Path) -> None:
    """Without a certificate none is measured. Docker comes first where it answers."""
    docker = {} if engine.name == "docker" else NO_DOCKER
    done = run(tmp_path, "--quick", "--json", XDG_CACHE_HOME=str(tmp_path / "cache"), **docker)
    said: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, set(said)) == (0, {"justgoal", "possible", "checks", "noise"})
    assert (said["justgoal"], said["possible"], said["noise"]) == (__version__, True, None)
    assert said["checks"][0] == {
        "mark": "ok", "name": "engine", "finding": f"{engine.name} {engine.version}", "remedy": "",
    }  # fmt: skip


def test_no_engine(tmp_path: Path) -> None:
    done = run(tmp_path, PATH="/nonexistent", **NO_DOCKER)
    assert (done.returncode, done.stderr) == (2, "")
    lines = done.stdout.splitlines()
    assert lines[2:6] == [
        "missing  engine     no Docker Engine answers at unix:///nonexistent.sock",
        "                    start it (systemctl start docker), or use --engine bubblewrap",
        "missing  engine     bubblewrap is not installed",
        "                    apt install bubblewrap",
    ]
    assert [line.split()[1] for line in lines[6:-2]] == ["uid", "device", "clock", "disk"]
    assert lines[-2:] == ["", "a run is not possible here"]


@pytest.mark.slow
def test_torch_compile_is_tried(engine: Engine) -> None:
    line = doctor.compiling(engine)
    assert line.mark == "ok"
    assert re.fullmatch(r"torch\.compile works, in \S+ s", line.finding)


@pytest.mark.parametrize(
    ("program", "limit", "wanted"),
    [
        ("print('first'); print('last')", 60.0, (0, "last")),
        ("raise ValueError('no')", 60.0, (1, "ValueError: no")),
        ("import time; time.sleep(60)", 1.0, (None, "")),
    ],
    ids=["works", "fails", "hangs"],
)
def test_programs_in_a_sandbox(engine: Engine, program: str, limit: float, wanted: tuple[int | None, str]) -> None:
    assert doctor._python(engine, program, limit) == wanted
