"""What killed runtimes left on this machine: found by its mark (owners.py), and removed.

Every engine does so when it starts; `justgoal clean` also removes what all runtimes share and can make again.
"""

from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass

from docker import DockerClient
from docker.errors import NotFound

from justgoal import figures, owners
from justgoal.sandboxes import cgroups, daemon, images, mounts, staging


@dataclass(frozen=True)
class Removed:
    """How many of each."""

    containers: int
    groups: int
    folders: int

    def __str__(self) -> str:
        names = {"containers": "container", "groups": "control group", "folders": "folder"}
        found = [figures.amount(number, names[kind]) for kind, number in asdict(self).items() if number]
        return ", ".join(found) or "nothing"


def sweep(client: DockerClient | None = None) -> Removed:
    """Remove what runtimes that have ended left behind, processes first; containers where there is a client."""
    hierarchies = cgroups.usable()
    containers = _containers(client, hierarchies) if client and hierarchies else 0
    groups = hierarchies.sweep() if hierarchies else 0
    return Removed(containers, groups, owners.sweep() + mounts.sweep_workspaces())


def clean() -> list[str]:
    """All that can be removed, and one line for each part of it."""
    with ExitStack() as stack:
        client = stack.enter_context(closing(daemon.connect())) if daemon.answers() else None
        lines = [f"left by runs that were killed: {sweep(client)}"]
        if client is None:
            lines.append("no Docker Engine answers: containers were not looked for")
        if not stack.enter_context(staging.unused()):
            return [*lines, "staged packages: kept, somebody uses them"]
        if client is not None:
            images.remove_old(client)
        staging.remove_all()
        return [*lines, "staged packages: removed"]


def _containers(client: DockerClient, hierarchies: cgroups.Hierarchies) -> int:
    """A frozen container cannot die: its processes are killed first, and thawed."""
    with daemon.explained("look for containers that were left behind"):
        found = client.api.containers(all=True, filters={"label": daemon.OWNER})
    left = [one["Id"] for one in found if owners.dead(one["Labels"][daemon.OWNER])]
    for container in left:
        with daemon.explained("look at a container"), suppress(NotFound, FileNotFoundError):
            if pid := client.api.inspect_container(container)["State"]["Pid"]:
                hierarchies.of_process(pid).kill()
        daemon.remove(client, container)
    return len(left)
