"""Fixtures for tests that need real sandboxes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from justgoal.sandboxes import UID, Limits, mounts
from justgoal.sandboxes.bubblewrap import Bubblewrap
from justgoal.sandboxes.shell import Shell, agent_spec

GIB = 1 << 30


@pytest.fixture(scope="session")
def engine() -> Bubblewrap:
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("sandboxes need root and bubblewrap")
    return Bubblewrap()


@pytest.fixture(scope="module")
def shell(engine: Bubblewrap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """An agent's shell; the tests of a module share it."""
    folder = tmp_path_factory.mktemp("agent")
    workspace = folder / "run" / "workspace"
    mounts.own_folder(workspace, UID)
    task = mounts.stage_tree(Path(__file__).parents[1] / "prompts")
    sandbox = engine.start(agent_spec(workspace, task, None, Limits(GIB, 200, 2), UID))
    yield Shell(sandbox, None)
    sandbox.close()
