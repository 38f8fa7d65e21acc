"""The NVIDIA GPUs of this machine, and what a sandbox needs to use one: device nodes, the driver's libraries, CUDA.

Read from the driver's own files, so that the runtime needs neither torch nor a library for it.
"""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from justgoal.errors import Fatal, UsageError
from justgoal.sandboxes import Mount

CUDA = "/usr/local/cuda"
"""Where the toolkit lies inside."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
_SHARED = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


@dataclass(frozen=True)
class Gpu:
    uuid: str
    model: str
    node: str


def found() -> list[Gpu]:
    """In the order of their device nodes."""
    gpus = []
    for file in _DRIVER.glob("*/information"):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        values = {name.strip(): value.strip() for name, value in fields.items()}
        gpus.append(Gpu(values["GPU UUID"], values["Model"], f"/dev/nvidia{values['Device Minor']}"))
    return sorted(gpus, key=lambda gpu: gpu.node)


def first() -> Gpu:
    """The one that is used where nobody names another; UsageError without any."""
    gpus = found()
    if not gpus:
        raise UsageError("there is no NVIDIA GPU on this machine (nvidia-smi -L)")
    return gpus[0]


def nodes(uuids: Sequence[str]) -> list[str]:
    """The device nodes of these GPUs, and those that all share. Raises Fatal when one of them is not here."""
    here = {gpu.uuid: gpu.node for gpu in found()}
    for uuid in uuids:
        if uuid not in here:
            raise Fatal(f"there is no GPU {uuid} on this machine (nvidia-smi -L)")
    return [*(here[uuid] for uuid in uuids), *(node for node in _SHARED if Path(node).exists())]


def mounts() -> list[Mount]:
    """The driver's libraries where the linker's cache says that they are, and the toolkit if there is one."""
    folders = {path.parent for path in (_library(), _library().resolve())}
    usual = (Path("/usr/lib"), Path("/lib"), Path("/usr/lib64"), Path("/lib64"))
    driver = [Mount(folder, str(folder)) for folder in folders if not any(map(folder.is_relative_to, usual))]
    toolkit = _toolkit()
    return driver + ([Mount(toolkit, CUDA)] if toolkit else [])


def environment(uuids: Sequence[str], path: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_HOME": CUDA, "PATH": f"{path}:{CUDA}/bin"}


def _library() -> Path:
    """libcuda as this process finds it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Fatal(f"the NVIDIA driver's library cannot be loaded: {error}") from error
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line]
    return Path(paths[0])


def _toolkit() -> Path | None:
    """The folder that nvcc's `bin` is in."""
    compiler = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:{CUDA}/bin")
    return Path(compiler).resolve().parents[1] if compiler else None
