"""Images of containers: an empty one, whose system is mounted from this machine, or one that the user names.

The empty image holds nothing but the places to mount on, as empty folders and files, and the system's links. It is
imported once, and again when those places have changed; nothing is ever pulled.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath

import docker
from docker.errors import ImageNotFound

from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import Mount, daemon

LABEL = "justgoal"
_REPOSITORY = "justgoal/empty"


def empty(client: docker.DockerClient, places: list[Mount], links: dict[str, str]) -> str:
    """Id of the empty image with these places, imported now if it is not there yet."""
    archive = _archive(places, links)
    name = f"{_REPOSITORY}:{hashlib.sha256(archive).hexdigest()[:16]}"
    with daemon.explained("import an empty image"):
        try:
            image = client.images.get(name)
        except ImageNotFound:
            repository, tag = name.split(":")
            label = f"LABEL {LABEL}=empty"
            client.api.import_image_from_data(archive, repository=repository, tag=tag, changes=[label])
            image = client.images.get(name)
    return str(image.id)


def named(client: docker.DockerClient, name: str) -> tuple[str, dict[str, str]]:
    """Id and environment of an image that is here; raises UsageError when it is not."""
    with daemon.explained(f"look up image {name}"):
        try:
            image = client.images.get(name)
        except ImageNotFound:
            raise UsageError(f"no image {name!r} here: docker pull {name}, or justgoal sandbox build") from None
    variables = image.attrs["Config"].get("Env") or []
    return str(image.id), dict(variable.split("=", 1) for variable in variables)


def build(folder: Path, tag: str, base: str | None) -> Iterator[str]:
    """Build the Dockerfile in `folder`, on `base` instead of its own if one is named; yields what the engine prints."""
    with closing(daemon.connect()) as client, daemon.explained("build an image"):
        arguments = {"BASE": base} if base else {}
        for part in client.api.build(str(folder), tag=tag, rm=True, forcerm=True, decode=True, network_mode="host",
                                     buildargs=arguments):  # fmt: skip
            if "error" in part:
                raise Fatal(f"cannot build an image: {' '.join(part['error'].split())}")
            yield from str(part.get("stream", "")).splitlines()


def remove_old(client: docker.DockerClient) -> int:
    """Remove the empty images that no container needs; how many there were."""
    with daemon.explained("remove empty images"):
        images = client.images.list(filters={"label": f"{LABEL}=empty"})
        for image in images:
            client.images.remove(image.id, force=True)
    return len(images)


def _archive(places: list[Mount], links: dict[str, str]) -> bytes:
    """The same bytes for the same places."""
    folders = {str(parent) for place in places for parent in PurePosixPath(place.target).parents} - {"/"}
    folders |= {place.target for place in places if place.source.is_dir()}
    files = {place.target for place in places} - folders
    folders |= {str(parent) for path in links for parent in PurePosixPath(path).parents} - {"/"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folders | files | set(links)):
            member = tarfile.TarInfo(path.lstrip("/"))
            member.mode = 0o755 if path in folders else 0o644
            if path in folders:
                member.type = tarfile.DIRTYPE
            elif path in links:
                member.type, member.linkname = tarfile.SYMTYPE, links[path]
            archive.addfile(member)
    return buffer.getvalue()
