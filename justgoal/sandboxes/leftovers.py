"""What killed runtimes left on this machine: found by its mark (owners.py), and removed.

Every engine does so when it starts; `justgoal clean` also removes what all runtimes share and can make again.
"""

from contextlib import closing, suppress
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
    hierarchies = cgroups.hierarchies()
    containers = _containers(client, hierarchies) if client else 0
    return Removed(containers, hierarchies.sweep(), owners.sweep() + mounts.sweep_workspaces())


def clean() -> list[str]:
    """All that can be removed, and one line for each part of it."""
    lines = []
    if daemon.answers():
        with closing(daemon.connect()) as client:
            lines.append(f"left by runs that were killed: {sweep(client)}")
            images.remove_old(client)
    else:
        lines.append(f"left by runs that were killed: {sweep()}")
        lines.append("no Docker Engine answers: containers were not looked for")
    shared = staging.remove_all()
    lines.append("staged packages: removed" if shared else "staged packages: kept, somebody uses them")
    return lines


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
