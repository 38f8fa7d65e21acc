"""Somebody who is not root: what holds for root's sandboxes holds for his, and he can do a whole run."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from messages_server import MessagesServer, say, text, use
from solutions import HONEST, processes
from somebody import NUMBER, Somebody, given_groups, somebody

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as somebody else already")

PROGRAM = "from justgoal.cli import main; main()"
TASK = "tests/operators/scale_add"


@pytest.fixture(scope="module")
def user() -> Iterator[Somebody]:
    with somebody() as user:
        yield user
        assert [command for pid, _, command in processes() if command and user.runs(pid)] == []


def suite(user: Somebody, *files: str, groups: Sequence[Path] = ()) -> str:
    """The last line of these tests, run as him in bubblewrap."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(user.home / "tests")]
    chosen = ["-k", "not docker] and not docker-", "-m", "not slow and not thorough"]
    done = user.run(*words, *chosen, *files, cwd=user.checkout, groups=groups)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


BORDERS = ["identity", "inherits_nothing", "nothing_is_writable_but_tmpfs", "sees_no_process_of_the_host", "no_network",
           "freeze_outruns_a_storm"]  # fmt: skip
LIMITS = ["memory_limit", "cpu_limit", "process_limit", "freeze", "close_leaves_nothing", "dies_with_the_runtime"]


def named(names: Sequence[str]) -> list[str]:
    return [f"tests/test_sandbox.py::test_{name}[bubblewrap]" for name in names]


def test_signals(user: Somebody) -> None:
    """What is not so under root, and that all else that matters most is."""
    assert re.match(r"17 passed, 1 skipped in", suite(user, *named([*BORDERS, *LIMITS]), "tests/signals.py"))


@pytest.mark.slow
def test_sandboxes(user: Somebody) -> None:
    files = ["sandbox", "shell", "tools", "device", "leftovers"]
    assert re.match(r"\d+ passed, ", suite(user, *(f"tests/test_{name}.py" for name in files)))


def test_given_control_groups(user: Somebody) -> None:
    """Whoever has control groups has all limits, and the freezer that root has."""
    with given_groups() as groups:
        assert re.match(r"6 passed in", suite(user, *named(LIMITS), groups=groups))


def test_doctor(user: Somebody) -> None:
    done = user.run("-c", PROGRAM, "doctor", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ok       uid        {NUMBER} here and in sandboxes\n" in done.stdout
    assert re.search(r"\n(ok  |weak)     freezer    signals, frozen in \S+ [um]s\n", done.stdout)
    assert (
        "weak     limits     of each process, not of a sandbox as a whole\n"
        "                    run as root, or as a user whom systemd gives control groups: loginctl enable-linger\n"
    ) in done.stdout


NO_NAMESPACES = """
import os, sys
script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all -- "$@"'
inside = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", script, "inside", sys.executable, "-c"]
os.execvp("unshare", [*inside, *sys.argv[1:]])
"""


def test_user_namespaces_are_forbidden(user: Somebody) -> None:
    """One line says so and what to do."""
    solution = solution_of(user)
    done = user.run("-c", NO_NAMESPACES, PROGRAM, "evaluate", solution, "--task", str(user.checkout / TASK))
    switch = "sudo sysctl user.max_user_namespaces=10000"
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", f"error: user namespaces are forbidden here: {switch}, or run as root\n",
    )  # fmt: skip


def solution_of(user: Somebody) -> str:
    folder = user.home / "solution"
    folder.mkdir(exist_ok=True)
    (folder / "solution.py").write_text(HONEST)
    return str(folder)


@pytest.mark.slow
def test_evaluation(user: Somebody) -> None:
    """From packages that are root's: they are copied, since links to what is not one's own are forbidden."""
    shutil.rmtree(user.neutral)
    words = ["evaluate", solution_of(user), "--task", str(user.checkout / TASK), "--json"]
    done = user.run("-c", PROGRAM, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"]["kind"] == "correct"
    [library] = user.neutral.glob("stage/*/venv/lib/*/site-packages/torch/lib/libtorch_cpu.so")
    assert (library.stat().st_nlink, library.stat().st_uid) == (1, NUMBER)


@pytest.mark.thorough
def test_recorded_run(user: Somebody) -> None:
    """A whole run, and once more from its recording."""
    write = f"mkdir solution\ncat > solution/solution.py <<'END'\n{HONEST}\nEND"
    command = f"{write}\nid -u\nevaluate; evaluate; evaluate"
    script = [say(text("."), use("toolu_1", command=command), stop="tool_use")]
    words = ["run", str(user.checkout / TASK), "--runs", str(user.home / "runs"), "--name"]
    with MessagesServer(*script) as server:
        options = ["first", "--model", "m", "--base-url", server.url, "--patience", "2"]
        done = user.run("-c", PROGRAM, *words, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    played = user.run("-c", PROGRAM, *words, "again", "--model", "recorded:first", "--runs", str(user.home / "runs"))
    assert played.returncode == 0, played.stdout + played.stderr
    for name, said in (("first", done.stdout), ("again", played.stdout)):
        assert f", uid {NUMBER}, no network, weak limits\n" in said
        run = json.loads((user.home / "runs" / name / "run.json").read_text())
        result = json.loads((user.home / "runs" / name / "result.json").read_text())
        assert (run["uid"], run["limits"], run["engine"]) == (NUMBER, "weak", "bubblewrap")
        assert (result["champion"], result["final"]["kind"]) == (1, "correct")
        assert f"{NUMBER}\\nevaluation 1: correct" in (user.home / "runs" / name / "events.jsonl").read_text()
