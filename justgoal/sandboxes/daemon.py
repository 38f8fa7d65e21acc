"""The Docker Engine of this machine, and what it says when something is wrong, in one line that tells what to do."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from justgoal.errors import Fatal, JustgoalError, UsageError

OLDEST = (1, 41)
"""Of its API: Docker Engine 20.10, the first whose containers have control groups of their own to see."""
OWNER, ROLE = "justgoal.owner", "justgoal.role"
"""Labels of our containers: the mark of the runtime (owners.py), and what the sandbox is for."""
_PATIENCE = 120  # s for an answer


def answers() -> bool:
    """Whether there is an engine that we may use, and of a version that will do. Its containers are frozen by root."""
    if os.geteuid() != 0:
        return False
    with suppress(JustgoalError):
        connect().close()
        return True
    return False


def connect() -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST names, or of the one at its usual place; raises UsageError."""
    place = address()
    try:
        _knock(place)
        client = docker.DockerClient(base_url=place, timeout=_PATIENCE, version="auto")
    except PermissionError as error:
        raise UsageError(f"no permission on the Docker Engine's socket {place}: run as root or with sudo") from error
    except (OSError, DockerException) as error:
        raise UsageError(_refusal(place, str(error))) from error
    if tuple(map(int, client.api.api_version.split("."))) < OLDEST:
        version = client.version()["Version"]
        client.close()
        raise UsageError(f"Docker Engine {version} is too old: 20.10 or newer is needed, or --engine bubblewrap")
    return client


def address() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Errors of the engine inside become one line; `doing` says what it was asked for."""
    try:
        yield
    except (DockerException, requests.RequestException) as error:
        raise _fatal(doing, error) from error


def remove(client: docker.DockerClient, container: str) -> None:
    """Kill and remove a container; that it is gone, or is being removed, is as good."""
    with explained("remove a container"):
        try:
            client.api.remove_container(container, force=True, v=True)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != 409:
                raise


def _fatal(doing: str, error: Exception) -> Fatal:
    text = error.explanation if isinstance(error, APIError) and error.explanation else str(error)
    text = " ".join(str(text).split())
    if "no space left on device" in text:
        return Fatal(f"cannot {doing}: the disk of the Docker Engine is full; free some, e.g. docker system prune")
    if "could not select device driver" in text:
        return Fatal(
            f"cannot {doing}: the Docker Engine knows no NVIDIA runtime; install the NVIDIA Container Toolkit, "
            "then: nvidia-ctk runtime configure && systemctl restart docker"
        )
    if "bind source path does not exist" in text:
        return Fatal(f"cannot {doing}: the Docker Engine does not see this machine's files; it must run here")
    if isinstance(error, requests.ConnectionError | requests.Timeout):
        return Fatal(f"cannot {doing}: the Docker Engine at {address()} no longer answers")
    return Fatal(f"cannot {doing}: the Docker Engine says: {text}")


def _knock(place: str) -> None:
    """Raise OSError when nobody listens at a socket: the client would say so less clearly."""
    if place.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(place.removeprefix("unix://"))


def _refusal(place: str, text: str) -> str:
    """Why there is no client."""
    if re.search(r"No such file|Connection refused|Connection aborted|Max retries|timed out", text):
        return f"no Docker Engine answers at {place}: start it (systemctl start docker), or use --engine bubblewrap"
    if "API versions below" in text:
        return f"the Docker Engine at {place} is too old: 20.10 or newer is needed, or --engine bubblewrap"
    return f"cannot use the Docker Engine at {place}: {' '.join(text.split())}"
