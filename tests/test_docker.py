"""What is special to the Docker Engine: how it is chosen, its images, and what is said when something is wrong with it.

The borders of its sandboxes are tried in test_sandbox.py, beside bubblewrap's.
"""

import _ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import pytest
from solutions import HONEST, SCALE_ADD

from justgoal import owners
from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import UID, Engine, Limits, Spec, daemon, engines, images
from justgoal.sandboxes.docker import Docker

LIMITS = Limits(256 << 20, 64, 2)
TRUE = Spec("worker", ("/usr/bin/true",), LIMITS, UID)
pytestmark = pytest.mark.docker("only")


def ours() -> list[str]:
    """Containers of this process, running or not."""
    label = f"{daemon.OWNER}={owners.mark()}"
    with closing(daemon.connect()) as client:
        return sorted(one["Id"] for one in client.api.containers(all=True, filters={"label": label}))


# -------------------------------------------------------------------- which engine


def test_docker_is_the_default_where_it_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for host, name in (("unix:///var/run/docker.sock", "docker"), ("unix:///nowhere/docker.sock", "bubblewrap")):
        monkeypatch.setenv("DOCKER_HOST", host)
        with closing(engines.choose()) as chosen:
            assert (chosen.name, chosen.image) == (name, None)


def test_an_image_is_for_docker() -> None:
    with pytest.raises(
        UsageError, match=r"^--image needs the Docker Engine: bubblewrap uses this machine's own system$"
    ):
        engines.choose("bubblewrap", "debian")


def test_image_that_is_not_here(engine: Engine) -> None:
    for name in ("justgoal/none", "justgoal/none:1"):
        expected = f"^no image '{name}' here: docker pull {name}, or justgoal sandbox build$"
        with pytest.raises(UsageError, match=expected):
            engines.choose(None, name)


def test_the_empty_image_is_imported_once(engine: Engine) -> None:
    with closing(daemon.connect()) as client:
        before = {image.id for image in client.images.list(filters={"label": "justgoal=empty"})}
        engines.choose("docker").close()
        assert {image.id for image in client.images.list(filters={"label": "justgoal=empty"})} == before
        assert len(before) >= 1
        [size] = {image.attrs["Size"] for image in client.images.list(filters={"label": "justgoal=empty"})}
        assert size < 1000


DOCKERFILE = """
ARG BASE=justgoal-nowhere/at-all
FROM ${BASE}
ENV PATH=/from/the/image:/bin FROM_IMAGE=1 HOME=/root
ENTRYPOINT ["/nothing"]
HEALTHCHECK CMD ["/nothing"]
VOLUME /volume
"""


@pytest.fixture
def image(engine: Docker, tmp_path: Path) -> Iterator[str]:
    """One that has this machine's system in it, as far as Python needs it, and is hostile in its settings."""
    libraries = subprocess.run(["ldd", "/usr/bin/env", "/usr/bin/bash", sys.executable, _ctypes.__file__], text=True,
                               capture_output=True, check=True).stdout  # fmt: skip
    files = {*re.findall(r"(/\S+\.so[^\s:]*)", libraries), "/usr/bin/env", "/usr/bin/bash"}
    root = tmp_path / "root"
    for file in map(Path, files):
        target = root / str(file).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
        target.chmod(0o755)
    with closing(daemon.connect()) as client:
        subprocess.run(["tar", "-C", str(root), "-cf", str(tmp_path / "root.tar"), "."], check=True)
        client.api.import_image_from_file(str(tmp_path / "root.tar"), repository="justgoal-test", tag="base")
        folder = tmp_path / "context"
        folder.mkdir()
        (folder / "Dockerfile").write_text(DOCKERFILE)
        lines = list(images.build(folder, "justgoal-test:image", "justgoal-test:base"))
        assert "Successfully tagged justgoal-test:image" in lines
        yield "justgoal-test:image"
        for name in ("justgoal-test:image", "justgoal-test:base"):
            client.images.remove(name, force=True)


def test_an_image_with_settings_of_its_own(image: str) -> None:
    """Its files and variables are there; who we are, what runs and what may be written is ours."""
    code = """
import json, os
print(json.dumps([os.environ.get("FROM_IMAGE"), os.environ["PATH"].split(":")[-2:], os.environ["HOME"], os.getuid(),
                  os.path.exists("/usr/bin/g++"), os.access("/volume", os.W_OK)]))
"""
    with closing(daemon.connect()) as client, closing(engines.choose("docker", image)) as used:
        assert used.image == client.images.get(image).id
        volumes = client.volumes.list()
        sandbox = used.start(Spec("worker", ("/opt/venv/bin/python", "-c", code), LIMITS, UID))
        with closing(sandbox):
            assert sandbox.exit_status(30) == 0
            said = json.loads(os.read(sandbox.output, 4096))
        assert client.volumes.list() == volumes
    assert said == ["1", ["/from/the/image", "/bin"], "/tmp/home", UID, False, False]


def test_an_image_that_cannot_be_built(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY nothing /\n")
    with pytest.raises(Fatal, match=r"^cannot build an image: (the Docker Engine says: )?COPY failed: .*nothing"):
        list(images.build(tmp_path, "justgoal-test:none", None))
    (tmp_path / "Dockerfile").write_text("ARG BASE=x\nFROM ${BASE}\nRUN true\n")
    with pytest.raises(Fatal, match=r"^cannot build an image: "):
        list(images.build(tmp_path, "justgoal-test:none", "justgoal-nowhere/at-all"))


# -------------------------------------------------------------------- errors that users meet


def evaluate(folder: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    (folder / "solution").mkdir()
    (folder / "solution" / "solution.py").write_text(HONEST)
    words = ["evaluate", "solution", "--task", str(SCALE_ADD), *options]
    program = [sys.executable, "-c", "from justgoal.cli import main; main()", *words]
    done = subprocess.run(
        program, cwd=folder, text=True, env={**os.environ, **environment}, capture_output=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("host", "line"),
    [
        ("unix:///nowhere/docker.sock",
         "no Docker Engine answers at unix:///nowhere/docker.sock: start it (systemctl start docker), or use"
         " --engine bubblewrap"),
        ("tcp://127.0.0.1:9",
         "no Docker Engine answers at tcp://127.0.0.1:9: start it (systemctl start docker), or use"
         " --engine bubblewrap"),
        ("nonsense://x", "cannot use the Docker Engine at nonsense://x: Invalid bind address protocol: nonsense://x"),
    ],
    ids=["no socket", "nobody listens", "no address"],
)  # fmt: skip
def test_no_engine(tmp_path: Path, host: str, line: str) -> None:
    assert evaluate(tmp_path, "--engine", "docker", DOCKER_HOST=host) == (2, "", f"error: {line}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["solution"]


def test_no_permission(engine: Engine) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setuid(UID)
            engines.choose("docker")
        except BaseException as error:
            os.write(write, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 4096).decode()
    place = daemon.address()
    assert said == f"UsageError no permission on the Docker Engine's socket {place}: run as root or with sudo"


def test_no_gpu_runtime(engine: Engine) -> None:
    with closing(daemon.connect()) as client:
        if "nvidia" in client.info()["Runtimes"]:
            pytest.skip("there is an NVIDIA runtime here")
    with pytest.raises(Fatal) as raised:
        engine.start(Spec("worker", ("/usr/bin/true",), LIMITS, UID, gpus=("GPU-1",)))
    assert str(raised.value) == (
        "cannot start a sandbox: the Docker Engine knows no NVIDIA runtime; install the NVIDIA Container Toolkit, "
        "then: nvidia-ctk runtime configure && systemctl restart docker"
    )
    assert ours() == []


def test_command_that_does_not_exist(engine: Engine) -> None:
    with pytest.raises(Fatal, match=r"^a sandbox did not start: /no/such: No such file or directory$"):
        engine.start(Spec("worker", ("/no/such",), LIMITS, UID))
    assert ours() == []


class OldEngine(BaseHTTPRequestHandler):
    """Answers as an old engine does."""

    version = "1.39"

    def do_GET(self) -> None:
        answer = json.dumps({"Version": "18.09.1", "ApiVersion": self.version, "MinAPIVersion": "1.12"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_HEAD = do_GET  # noqa: N815

    def address_string(self) -> str:
        return "a client"

    def log_message(self, *_: object) -> None:
        pass


class AncientEngine(OldEngine):
    version = "1.20"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (OldEngine, "Docker Engine 18.09.1 is too old: 20.10 or newer is needed, or --engine bubblewrap"),
        (AncientEngine, "the Docker Engine at {place} is too old: 20.10 or newer is needed, or --engine bubblewrap"),
    ],
    ids=["old", "ancient"],
)
def test_old_engine(tmp_path: Path, kind: type[OldEngine], line: str) -> None:
    place = f"unix://{tmp_path}/old.sock"
    with UnixStreamServer(f"{tmp_path}/old.sock", kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            done = evaluate(tmp_path, "--engine", "docker", DOCKER_HOST=place)
        finally:
            server.shutdown()
    assert done == (2, "", f"error: {line.format(place=place)}\n")


@pytest.fixture
def small(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """An engine of its own with a disk of 16 MB, and what fills that and what ends the engine."""
    data = tmp_path / "data"
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(data)], check=True)
    place = tmp_path / "docker.sock"
    command = ["dockerd", "--bridge", "none", "--iptables=false", "--data-root", str(data), "--exec-root",
               str(tmp_path / "exec"), "--pidfile", str(tmp_path / "pid"), "--host", f"unix://{place}"]  # fmt: skip
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{place}")

        def end() -> None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

        try:
            deadline = time.monotonic() + 30
            while not daemon.answers():
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)

            def fill() -> None:
                with pytest.raises(OSError, match="No space left"), (data / "filler").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))

            yield fill, end
        finally:
            end()
            subprocess.run(["umount", "--recursive", "--lazy", str(data)], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK forgets sockets
def test_disk_full_and_engine_gone(small: tuple[Callable[[], None], Callable[[], None]]) -> None:
    fill, end = small
    with closing(engines.choose("docker")) as other:
        other.start(TRUE).close()
        fill()
        assert refusal(other) == (
            "cannot start a sandbox: the disk of the Docker Engine is full; free some, e.g. docker system prune"
        )
        assert ours() == []
        end()
        assert refusal(other) == f"cannot start a sandbox: the Docker Engine at {daemon.address()} no longer answers"
    gc.collect()


def refusal(engine: Engine) -> str:
    """The line that says why it starts nothing; the error itself, which holds the SDK's sockets, is let go."""
    try:
        engine.start(TRUE)
    except Fatal as error:
        return str(error)
    return ""
