"""Fixtures for tests that need real sandboxes, and which engines make them.

A test that takes `engine` runs with bubblewrap. Marked `docker`, alone or with its module, it runs with the Docker
Engine too; marked `docker("slow")` that second time is a slow test, marked `docker("only")` there is no first time.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from justgoal.errors import JustgoalError
from justgoal.sandboxes import UID, Engine, Limits, engines, mounts
from justgoal.sandboxes.shell import Shell, agent_spec

GIB = 1 << 30


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" not in metafunc.fixturenames:
        return
    names = [pytest.param("bubblewrap")]
    if mark := metafunc.definition.get_closest_marker("docker"):
        docker = pytest.param("docker", marks=[pytest.mark.slow] if "slow" in mark.args else [])
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
