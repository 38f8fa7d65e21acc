"""Fixtures for tests that need real sandboxes, which engines make them, and a noise certificate that none waits for.

A test that takes `engine` runs with bubblewrap. Marked `docker`, alone or with its module, it runs with the Docker
Engine too; marked `docker("slow")` that second time is a slow test, marked `docker("thorough")` it is one that only
`make test-engines` runs, since nothing in it depends on the engine; marked `docker("only")` there is no first time.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from justgoal import __version__, machine
from justgoal.errors import JustgoalError
from justgoal.evaluation import strength
from justgoal.evaluation.strength import Planted, Strength
from justgoal.sandboxes import UID, Engine, Limits, engines, mounts
from justgoal.sandboxes.shell import Shell, agent_spec
from justgoal.storage import write_json
from justgoal.tasks import contract

GIB = 1 << 30
CERTIFICATE: dict[str, Any] = {
    "device": "cpu", "made": 0.0, "null": {"softmax": [1.0, 1.001]}, "clock": {"softmax": [1e-8]}, "spread": 0.001,
    "bias": 0.001, "pairs": 5, "minimum_gain": 0.005, "false_rate": 0.001, "smallest_gain": 0.01,
    "shortest_latency": 1e-6,
}  # fmt: skip
"""Of a machine on which the tiny operators of the tests are not too short."""


CHECKED = (*contract.names(), str(Path(__file__).parent / "operators" / "scale_add"))
"""Operators that runs of tests need not check again; tests/test_checks.py checks."""
STRENGTH = Strength("", ("random inputs",), {}, (), (Planted("mean", False, "whose outputs vary", (0,), True),), ())
"""Of a strong task."""


def circumstances() -> dict[str, Any]:
    """Those of this machine, which a certificate in the cache folder names."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    cores = len(os.sched_getaffinity(0))
    return {"justgoal": __version__, "boot": boot, "processor": machine.processor()[0], "cores": cores}


@pytest.fixture(scope="session", autouse=True)
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What an earlier run has measured and checked, where every command that a test starts looks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", known(tmp_path_factory.mktemp("cache")))
        yield


def known(cache: Path, **figures: Any) -> str:
    """The folder, with a certificate of these figures, and with the strength of tasks."""
    folder = cache / "justgoal"
    (folder / "checks").mkdir(parents=True)
    certificate = {**CERTIFICATE, "made": time.time(), **figures}
    (folder / "noise-cpu.json").write_text(json.dumps({**circumstances(), "certificate": certificate}))
    for task in (task for name in CHECKED for task in contract.tasks(name)):
        found = {**strength.circumstances(), "strength": STRENGTH.to_json()}
        write_json(folder / "checks" / strength.file(task).name, found)
    return str(cache)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" not in metafunc.fixturenames:
        return
    names = [pytest.param("bubblewrap")]
    if mark := metafunc.definition.get_closest_marker("docker"):
        second = [getattr(pytest.mark, word) for word in mark.args if word != "only"]
        docker = pytest.param("docker", marks=second)
        names = [docker] if "only" in mark.args else [*names, docker]
    metafunc.parametrize("engine", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Where it is missing its tests are skipped; where CI is set they fail."""
    try:
        engine = engines.choose(request.param)
    except JustgoalError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shell(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """An agent's shell; the tests of a module share it."""
    folder = tmp_path_factory.mktemp("agent")
    workspace = folder / "run" / "workspace"
    mounts.own_folder(workspace, UID)
    task = mounts.stage_tree(Path(__file__).parents[1] / "prompts")
    sandbox = engine.start(agent_spec(workspace, task, None, Limits(GIB, 200, 2), UID))
    yield Shell(sandbox, None)
    sandbox.close()
