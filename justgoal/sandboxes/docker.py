"""Sandboxes made by the Docker Engine: a container each, with the same view, identity and limits as bubblewrap's.

Nothing is pulled: the image is empty and the system is mounted from this machine (see images.py), unless the user names
an image. The engine makes the container, and that is all: PID 1 (sandbox/launch.py) fetches the channel's descriptor
over a socket that is mounted for this moment, so nothing of ours ever passes through the engine; freezing, memory kills
and priorities are read and written in the container's own control groups.
"""

import json
import os
import select
import shutil
import signal
import socket
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from docker.types import DeviceRequest, LogConfig, Ulimit
from docker.types import Mount as Bind

from justgoal import owners, resources
from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import UID, Mount, Spec, cgroups, daemon, ends, images, leftovers, mounts, seccomp, staging

_DOORWAY = "/run/launch"
_STARTING = 60.0  # s
_COVERED = ("/sys", "/sys/fs/cgroup", "/dev/mqueue")
_SMALL = "ro,nosuid,nodev,noexec,size=4096,mode=0755"


class Docker:
    """The engine; see Engine. `image` names one that is here instead of the empty one."""

    name = "docker"
    limited = True

    def __init__(self, image: str | None = None) -> None:
        if os.geteuid() != 0:
            daemon.connect().close()  # whoever may not use its socket is told so
            raise UsageError("containers need root here: run as root or with sudo, or use --engine bubblewrap")
        self._client = daemon.connect()
        self._in_use = staging.use()
        try:
            self._prepare(image)
        except BaseException:
            self.close()
            raise

    def _prepare(self, image: str | None) -> None:
        self.version = str(self._client.version()["Version"])
        self._hierarchies = cgroups.hierarchies()
        leftovers.sweep(self._client)
        self._stage = mounts.stage()
        self._environment = mounts.environment(self._stage)
        self.image: str | None = None
        if image is None:
            places = [*mounts.mounts(self._stage, UID), Mount(Path("/"), _DOORWAY)]
            self._image = images.empty(self._client, places, mounts.links())
        else:
            self._image, variables = images.named(self._client, image)
            self.image = self._image
            path = ":".join(filter(None, (self._environment["PATH"], variables.get("PATH"))))
            self._environment = {**variables, **self._environment, "PATH": path}

    def start(self, spec: Spec) -> "DockerSandbox":
        """Start it; its command begins to run at once. Raises Fatal when it cannot be started."""
        mounts.existing(spec.mounts)
        folder = owners.make_folder("start")
        try:
            shutil.copyfile(resources.sandbox_files() / "launch.py", folder / "launch.py")
            with _Doorway(folder / "socket", spec.uid) as doorway, daemon.explained("start a sandbox"):
                container = self._create(spec, folder)
                try:
                    self._client.api.start(container)
                    return DockerSandbox(self, container, spec, doorway)
                except BaseException:
                    self.remove(container)
                    raise
        finally:
            owners.remove_folder(folder)

    def close(self) -> None:
        os.close(self._in_use)
        self._client.close()

    def order(self, spec: Spec) -> bytes:
        """What launch.py is told."""
        order = {
            "command": spec.command,
            "environment": {**self._environment, **spec.environment},
            "folder": mounts.first_folder(spec),
            "as_pid_1": spec.as_pid_1,
            "refused": seccomp.program(alarms=True).hex(),
        }
        return json.dumps(order).encode()

    def group(self, pid: int) -> cgroups.Group:
        return self._hierarchies.of_process(pid)

    def no_start(self, container: str) -> str:
        """Why PID 1 ended before it said anything: without a log only its exit code is known."""
        text = f"a sandbox did not start: its launcher ended with {self.status(container)}"
        hint = "does the image have a C library as new as this machine's?"
        return f"{text}; {hint}" if self.image else text

    def running(self, container: str) -> bool:
        with daemon.explained("look at a container"):
            return bool(self._client.api.inspect_container(container)["State"]["Running"])

    def status(self, container: str) -> int:
        """The exit code of one that has ended."""
        with daemon.explained("read how a container ended"):
            return int(self._client.api.wait(container)["StatusCode"])

    def killed_for_memory(self, container: str) -> bool:
        with daemon.explained("read how a container ended"):
            return bool(self._client.api.inspect_container(container)["State"]["OOMKilled"])

    def remove(self, container: str) -> None:
        daemon.remove(self._client, container)

    def _create(self, spec: Spec, folder: Path) -> str:
        """A container of this spec, not started yet."""
        api, limits = self._client.api, spec.limits
        tmpfs = {
            path: f"rw,exec,nosuid,nodev,mode=1777,size={size}" for path, size in mounts.sizes(spec).items()
        } | dict.fromkeys(_COVERED, _SMALL)
        # The engine's own resolv.conf tells of this machine's network.
        ours = [Mount(folder, _DOORWAY), Mount(Path(os.devnull), "/etc/resolv.conf")]
        binds = [*mounts.common(self._stage, spec.uid), *ours, *spec.mounts]
        if self.image is None:
            binds = [*mounts.system(), *binds]
            tmpfs |= dict.fromkeys(mounts.masked(), _SMALL)
        host = api.create_host_config(
            mounts=[Bind(m.target, str(m.source), type="bind", read_only=not m.writable) for m in binds],
            tmpfs=tmpfs,
            read_only=True,
            network_mode="none",
            ipc_mode="none",
            cgroupns="private",
            userns_mode="host",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            mem_limit=limits.memory,
            memswap_limit=limits.memory,
            pids_limit=limits.pids,
            # A quota of all cores only adds jitter.
            nano_cpus=int(limits.cpus * 1e9) if limits.cpus < len(os.sched_getaffinity(0)) else None,
            ulimits=[Ulimit(name="core", soft=0, hard=0), Ulimit(name="nofile", soft=4096, hard=4096)],
            log_config=LogConfig(type="none"),
            device_requests=[DeviceRequest(device_ids=list(spec.gpus), capabilities=[["gpu"]])] if spec.gpus else None,
        )
        made = api.create_container(
            self._image,
            entrypoint=[f"{staging.VENV}/bin/python", "-ISE", f"{_DOORWAY}/launch.py"],
            command=[f"{_DOORWAY}/socket"],
            hostname="sandbox",
            user=f"{spec.uid}:{spec.uid}",
            working_dir="/",
            host_config=host,
            healthcheck={"test": ["NONE"]},
            labels={daemon.OWNER: owners.mark(), daemon.ROLE: spec.role},
            use_config_proxy=False,
        )
        return str(made["Id"])


class _Doorway:
    """The socket at which the container's PID 1 asks what to do."""

    def __init__(self, path: Path, uid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        os.chown(path, uid, uid)
        path.chmod(0o600)
        self._socket.listen(1)

    def __enter__(self) -> "_Doorway":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def knock(self, timeout: float) -> tuple[socket.socket, int] | None:
        """Who has come, and the number of its process; None when nobody has within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            caller, _ = self._socket.accept()
        except TimeoutError:
            return None
        peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return caller, struct.unpack("3i", peer)[0]


class DockerSandbox:
    """A running one; see Sandbox."""

    def __init__(self, engine: Docker, container: str, spec: Spec, doorway: _Doorway) -> None:
        self.spec = spec
        self.container = container
        self._engine = engine
        self._code: int | None = None
        caller, pid = self._first_word(doorway)
        with caller, ExitStack() as opened:
            self._pidfd = os.pidfd_open(pid)
            opened.callback(os.close, self._pidfd)
            self._group = engine.group(pid)
            self.freezer = self._group.freezer(pid)
            opened.callback(self.freezer.close)
            self._memory_events = self._group.memory_events()
            opened.callback(os.close, self._memory_events)
            if spec.idle:
                self._group.idle(True)
            if spec.role == "agent":
                cgroups.spare(pid)
            self.channel, far, self.output, write = ends(spec, opened)
            with far, os.fdopen(write):
                self._launch(caller, far, write)
            self._opened = opened.pop_all()
        self._closed = False

    def _first_word(self, doorway: _Doorway) -> tuple[socket.socket, int]:
        end = time.monotonic() + _STARTING
        while time.monotonic() < end:
            if found := doorway.knock(0.5):
                return found
            if not self._engine.running(self.container):
                raise Fatal(self._engine.no_start(self.container))
        raise Fatal(f"a sandbox did not start: its launcher said nothing for {_STARTING:g} s")

    def _launch(self, caller: socket.socket, far: socket.socket, write: int) -> None:
        """Hand everything over, and wait until the command runs."""
        with Path(os.devnull).open("wb") as nowhere:
            printed = nowhere.fileno() if self.spec.quiet else write
            socket.send_fds(caller, [self._engine.order(self.spec)], [far.fileno(), printed])
        caller.settimeout(_STARTING)
        try:
            refusal = caller.recv(4096)
        except TimeoutError:
            refusal = b"its launcher does not come to an end"
        if refusal:
            raise Fatal(f"a sandbox did not start: {refusal.decode(errors='replace')}")

    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    def exit_status(self, timeout: float) -> int | None:
        """The engine reports a death by signal as 128 plus its number: an exit code of 139 reads as -11."""
        if self._code is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                return None
            self._code = self._engine.status(self.container)
        return 128 - self._code if 128 < self._code < 128 + signal.NSIG else self._code

    def background(self, idle: bool) -> None:
        self._group.idle(idle)

    def memory_kills(self) -> int:
        """Once the container has ended its group is gone: then only whether there was one."""
        try:
            return cgroups.memory_kills(self._memory_events)
        except OSError:
            return int(self._engine.killed_for_memory(self.container))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # arrives before the next instruction when thawed
        self.freezer.thaw()
        self._engine.remove(self.container)
        self._opened.close()
