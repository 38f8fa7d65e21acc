"""Which engine makes the sandboxes: the one that was asked for, else Docker where it answers, else bubblewrap."""

from typing import Literal

from justgoal.errors import UsageError
from justgoal.sandboxes import Engine, daemon
from justgoal.sandboxes.bubblewrap import Bubblewrap
from justgoal.sandboxes.docker import Docker

Name = Literal["docker", "bubblewrap"]


def choose(name: Name | None = None, image: str | None = None) -> Engine:
    """Raises UsageError when the engine is not there, or cannot use an image."""
    if name == "bubblewrap" and image is not None:
        raise UsageError("--image needs the Docker Engine: bubblewrap uses this machine's own system")
    if name == "bubblewrap" or (name is None and image is None and not daemon.answers()):
        return Bubblewrap()
    return Docker(image)
