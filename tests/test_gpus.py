"""What is said of GPUs where there are none, or as the driver would describe them; and whose packages come along."""

import sys
from pathlib import Path

import pytest

from justgoal.cli import main
from justgoal.errors import Fatal
from justgoal.sandboxes import gpus, staging

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 41
GPU UUID: \t GPU-{number}
Bus Location: \t 0000:00:0{number}.0
Device Minor: \t {number}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path)
    return tmp_path


def test_gpus_are_found_in_the_drivers_files(driver: Path) -> None:
    for number in (1, 0):
        folder = driver / f"0000:00:0{number}.0"
        folder.mkdir()
        (folder / "information").write_text(INFORMATION.format(number=number))
    zero, one = gpus.found()
    assert zero == gpus.first() == gpus.Gpu("GPU-0", "NVIDIA H200", "/dev/nvidia0")
    assert gpus.nodes(["GPU-1"])[0] == one.node == "/dev/nvidia1"


def test_a_gpu_that_is_not_here_is_named(driver: Path) -> None:
    with pytest.raises(Fatal) as caught:
        gpus.nodes(["GPU-7"])
    assert str(caught.value) == "there is no GPU GPU-7 on this machine (nvidia-smi -L)"


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("top_k_select", "there is no NVIDIA GPU on this machine (nvidia-smi -L)"),
        (
            "gated_delta_net_prefill",
            "gated_delta_net_prefill/ragged_4x8 is not for cuda: its operator names cpu",
        ),
    ],
)
def test_evaluate_says_why_it_cannot_use_a_gpu(
    task: str, line: str, driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["justgoal", "evaluate", str(driver), "--task", task, "--device", "cuda"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("requirement", "parsed"),
    [
        ("numpy", ("numpy", [], "")),
        ("triton==3.6.0; platform_system == 'Linux'", ("triton", [], "")),
        ('cuda-toolkit[cublas,nvrtc]==13.0.2; platform_system == "Linux"', ("cuda-toolkit", ["cublas", "nvrtc"], "")),
        ("nvidia-cublas==13.1.*; (sys_platform == 'linux') and extra == 'cublas'", ("nvidia-cublas", [], "cublas")),
        ('optree>=0.13.0; extra == "optree"', ("optree", [], "optree")),
    ],
)
def test_a_requirement_says_which_extras_it_needs_and_belongs_to(
    requirement: str, parsed: tuple[str, list[str], str]
) -> None:
    assert staging._parsed(requirement) == parsed
