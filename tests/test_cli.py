"""The installed command: bad input is one line on stderr, exit 2, and nothing is written."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import justgoal
from justgoal import events
from justgoal.tasks import contract
from justgoal.transcript import Transcript

COMMAND = Path(sys.executable).with_name("justgoal")
OPERATOR = "gated_delta_net_prefill"
WORKLOADS = ", ".join(workload.name for workload in contract.load(OPERATOR).workloads)
OPERATORS = ", ".join(contract.names())
CLAUDE = ("--model", "claude-opus-5-5")


def command(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run justgoal in `folder`, without a key and without a terminal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ANTHROPIC_")}
    return subprocess.run(
        [COMMAND, *arguments],
        cwd=folder,
        env={**inherited, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("run", "gated_delta", *CLAUDE),
            f"no operator 'gated_delta': there are {OPERATORS} (justgoal tasks list)",
        ),
        (
            ("run", f"{OPERATOR}/x", *CLAUDE),
            f"operator {OPERATOR} has no workload 'x': there are {WORKLOADS} (justgoal tasks show {OPERATOR})",
        ),
        (
            ("run", OPERATOR, "--model", "recoded:abc"),
            "model 'recoded:abc' has an unknown form: give an Anthropic-protocol model name such as"
            " claude-opus-5-5, or recorded:RUN",
        ),
        (
            ("run", OPERATOR, "--model", "recorded:abc"),
            "no run 'abc': give a run's name or folder; justgoal looks in runs/",
        ),
        (
            ("run", OPERATOR, *CLAUDE),
            "no API key: set ANTHROPIC_API_KEY (any value for a local --base-url)",
        ),
        (("run", OPERATOR), "missing option '--model' (justgoal run --help)"),
        (("run", *CLAUDE), "missing argument 'OPERATOR[/WORKLOAD]' (justgoal run --help)"),
        (
            ("run", OPERATOR, *CLAUDE, "--patience", "0"),
            "invalid value for '--patience': Input should be greater than or equal to 1 (justgoal run --help)",
        ),
        (
            ("run", OPERATOR, *CLAUDE, "--max-hours", "nan"),
            "invalid value for '--max-hours': Input should be greater than or equal to 0 (justgoal run --help)",
        ),
        (("tasks", "check", "gated_delta"), f"no operator 'gated_delta': there are {OPERATORS} (justgoal tasks list)"),
        (("show", "abc"), "no run 'abc': give a run's name or folder; justgoal looks in runs/"),
        (
            ("show", "\x1b[31m\n[red]"),
            r"no run '\x1b[31m\n[red]': give a run's name or folder; justgoal looks in runs/",
        ),
        (
            ("evaluate", "solution", "--task", "gated_delta"),
            f"no operator 'gated_delta': there are {OPERATORS} (justgoal tasks list)",
        ),
        (
            ("tasks", "show", "gated_delta"),
            f"no operator 'gated_delta': there are {OPERATORS} (justgoal tasks list)",
        ),
        (("tasks",), "missing command (justgoal tasks --help)"),
        (("fly",), "no such command 'fly' (justgoal --help)"),
        (("run", "--fast"), "no such option: --fast (justgoal run --help)"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    (tmp_path / "runs").mkdir()
    done = command(tmp_path, *arguments)
    assert (done.stderr.decode(), done.stdout, done.returncode) == (f"error: {line}\n", b"", 2)
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_no_folder_of_runs_is_made_for_bad_input(tmp_path: Path) -> None:
    assert command(tmp_path, "run", "gated_delta", *CLAUDE, "--runs", "made").returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("language", ["C", "C.UTF-8", "POSIX"])
def test_version(tmp_path: Path, language: str) -> None:
    done = command(tmp_path, "--version", environment={"LC_ALL": language})
    assert (done.stdout.decode(), done.stderr, done.returncode) == (
        f"justgoal {justgoal.__version__}\n",
        b"",
        0,
    )


def test_without_a_command_help_is_shown(tmp_path: Path) -> None:
    bare, asked = command(tmp_path), command(tmp_path, "--help")
    assert bare.stdout == asked.stdout and b"Judge a solution as in a run" in asked.stdout
    assert (bare.returncode, asked.returncode) == (2, 0)


def test_tasks_list_names_every_operator_and_workload(tmp_path: Path) -> None:
    listed = command(tmp_path, "tasks", "list").stdout.decode()
    for name in contract.names():
        operator = contract.load(name)
        assert f"{name}: {operator.title} ({', '.join(operator.devices)})\n" in listed
        assert f"  {operator.workloads[0].title} (default)\n" in listed
        assert all(f"  {workload.name} " in listed for workload in operator.workloads)


def test_tasks_show_says_all_about_an_operator(tmp_path: Path) -> None:
    done = command(tmp_path, "tasks", "show", OPERATOR)
    for line in (
        "  q           float32 [T, Hk, D]\n",
        "  cu_seqlens  int64 [N+1]\n",
        "  scale       float32\n",
        "  new_state  float32 [N, Hv, D, D]\n",
        "  Hv  head\n",
        "  ragged_4x8   T 895, N 24, Hk 4, Hv 8, D 128\n",
    ):
        assert line in done.stdout.decode()
    assert done.returncode == 0


def write_run(folder: Path) -> Path:
    """A run folder of one line and one hostile status."""
    folder.mkdir(parents=True)
    transcript = Transcript.open(folder / "events.jsonl")
    transcript.write(events.RunStarted({"task": "op/w", "device": "cpu", "processor": "X", "cores": 2, "model": "m"}))
    transcript.write(events.Stopped("failed", "± \x1b[31m"))
    transcript.close()
    return folder


def test_show_finds_a_run_by_name_and_by_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "mine")
    by_name = command(tmp_path, "show", "mine")
    assert by_name.stdout.decode() == (
        "run          mine\n"
        "task         op/w, cpu (X, 2 cores)\n"
        "model        m\n"
        "status       failed: ± \\x1b[31m\n"
        "time         00:00:00, 0 turns, 0 tokens in, 0 out\n"
        "result       no evaluation\n"
    )
    assert (by_name.returncode, by_name.stderr) == (0, b"")
    assert command(tmp_path, "show", str(folder)).stdout == by_name.stdout
    elsewhere = command(tmp_path / "runs" / "mine", "show", "mine", "--runs", str(tmp_path / "runs"))
    assert elsewhere.stdout == by_name.stdout


def test_a_damaged_transcript_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "mine") / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b"failed", b"passed"))
    done = command(tmp_path, "show", "mine")
    error = "error: transcript runs/mine/events.jsonl line 2: hash does not match; what is shown ends before it\n"
    assert (done.stderr.decode(), done.returncode) == (error, 2)
    assert b"model        m\nstatus       unfinished" in done.stdout


def test_output_that_the_locale_cannot_say_is_no_error(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "mine")
    done = command(tmp_path, "show", "mine", environment={"PYTHONIOENCODING": "ascii"})
    assert b"status       failed: \\xb1 \\x1b[31m\n" in done.stdout and done.returncode == 0


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "mine")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [COMMAND, "show", "mine"],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 1)


def test_show_and_help_start_without_what_is_heavy(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "mine")
    program = (
        "import sys; from justgoal.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "heavy = {'torch', 'numpy', 'anthropic', 'docker'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    for arguments in (["show", "mine"], ["--help"], ["tasks", "list"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, check=False
        )
        assert (done.stderr, done.returncode) == (b"", 0)
