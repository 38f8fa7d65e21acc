"""Where `evaluate` inside the agent's sandbox arrives, and all that an evaluation means for the run.

Served in the runtime's one thread, while a command of the agent runs: so every evaluation stands in the transcript
between a tool call and its result.
"""

import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from justgoal import figures, owners
from justgoal.errors import Resumable, StopRun
from justgoal.evaluation.collect import InvalidSolution, Solution, collect
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.events import Champion, Evaluation, EvaluationStarted
from justgoal.state import State
from justgoal.stopping import Patience
from justgoal.transcript import Transcript

REQUEST_CAP = 1 << 16
REQUEST_LIMIT = 1.0  # s for a request to arrive
SEND_LIMIT = 2.0  # s for an answer to be taken
USAGE = "usage: evaluate           judge /workspace/solution\n       evaluate --expert  the expert's figures here"
HELP = (["--help"], ["-h"])
ABSENT = "there is no folder /workspace/solution yet: nothing was judged, and nothing counts"


class Court:
    """Evaluations of one run: numbered, recorded before and after, answered from the record when repeated."""

    def __init__(
        self, folder: Path, evaluator: Evaluator, device: Device, transcript: Transcript, state: State
    ) -> None:
        self._folder = folder
        self._evaluator = evaluator
        self._device = device
        self._transcript = transcript
        self._state = state

    def evaluate(self) -> Verdict | None:
        """Judge what is in the workspace now, and write the verdict down; None when there is no solution at all."""
        source = self._folder / "workspace" / "solution"
        with self._device.exclusive():
            try:
                solution = collect(source)
            except InvalidSolution as problem:
                if not os.path.lexists(source):
                    return None
                self._transcript.write(EvaluationStarted(self._state.next_evaluation, "", {}))
                return self._record(Verdict("invalid", str(problem)))
            number = self._state.next_evaluation
            self._keep(solution, self._folder / "solutions" / str(number))
            self._transcript.write(EvaluationStarted(number, solution.sha256, solution.files))
            return self._record(self._judged(solution))

    def again(self) -> Verdict:
        """Judge the evaluation that an earlier process began and did not finish, under the same number."""
        started = self._state.evaluating
        assert started is not None
        if not started.files:
            return self._record(Verdict("invalid", "judged when the run was interrupted"))
        with self._device.exclusive():
            return self._record(self._judged(collect(self._folder / "solutions" / str(started.number))))

    def _judged(self, solution: Solution) -> Verdict:
        digest = solution.sha256
        for earlier in self._state.evaluations:
            if earlier["solution"] == digest:
                known = Verdict.from_json(earlier)
                repeated = dataclasses.replace(known, improved=False, repeat_of=known.repeat_of or known.number)
                return dataclasses.replace(repeated, reason=repeated.reason or "the same files")
        return dataclasses.replace(self._evaluator.evaluate(solution), solution=digest)

    def _record(self, verdict: Verdict) -> Verdict:
        number = self._state.next_evaluation
        verdict = dataclasses.replace(verdict, number=number)
        self._transcript.write(Evaluation(number, verdict.to_json()))
        if verdict.improved and verdict.speedup is not None:
            self.keep_champion(number)
            self._transcript.write(Champion(number, verdict.speedup))
        return verdict

    def keep_champion(self, number: int) -> None:
        """Make champion/ a copy of that solution."""
        target = self._folder / "champion"
        with _resumable():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(self._folder / "solutions" / str(number), target)

    def _keep(self, solution: Solution, target: Path) -> None:
        with _resumable():
            shutil.rmtree(target, ignore_errors=True)
            solution.write(target)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextmanager
def _resumable() -> Iterator[None]:
    """A full disk ends the process, not the run."""
    try:
        yield
    except OSError as error:
        raise Resumable(f"cannot write {error.filename or 'the run folder'}: {error.strerror}") from error


class Gate:
    """The socket that sandbox A sees as /run/justgoal/evaluate.sock."""

    def __init__(
        self,
        court: Court,
        state: State,
        patience: Patience,
        report: ExpertReport,
        uid: int,
        phase: Callable[[str], None],
        *,
        endless: bool = False,
    ) -> None:
        """`endless`: patience is counted and told, and does not end the run."""
        self._court = court
        self._state = state
        self._patience = patience
        self._report = report
        self._phase = phase
        self._endless = endless
        self.folder = owners.make_folder("gate")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.folder / "evaluate.sock"
        self._socket.bind(str(path))
        owners.give(path, uid)
        path.chmod(0o600)
        self._socket.listen(16)

    def fileno(self) -> int:
        return self._socket.fileno()

    def serve(self) -> bool:
        """Answer one request; whether it was an evaluation, which no command's deadline counts.

        Raises StopRun when its verdict was the last one that patience allows.
        """
        client, _ = self._socket.accept()
        with client:
            before = len(self._state.evaluations)
            text, code = self._answer(_arguments(client))
            with suppress(OSError):  # whoever asked may have gone; the verdict is in the transcript
                client.settimeout(SEND_LIMIT)
                client.sendall(json.dumps({"text": text, "code": code}).encode() + b"\n")
        self._phase("running a command")
        if not self._endless and (ending := self._patience.exceeded(self._state.evaluations)):
            raise StopRun(*ending)
        return len(self._state.evaluations) > before

    def _answer(self, arguments: list[str] | None) -> tuple[str, int]:
        if arguments == ["--expert"]:
            return self._report.sentence(), 0
        if arguments:
            return USAGE, 0 if arguments in HELP else 2
        if arguments is None:
            return "the request could not be read", 2
        verdict = self._court.evaluate()
        if verdict is None:
            return ABSENT, 2
        return self.text(verdict), 0 if verdict.correct else 1

    def text(self, verdict: Verdict) -> str:
        """All that the agent is told about a verdict."""
        lines = [f"evaluation {verdict.number}: {verdict.sentence()}"]
        if verdict.repeat_of is not None:
            lines.append(f"the same files as in evaluation {verdict.repeat_of}: not measured again")
        elif standing := verdict.standing():
            lines.append(standing)
        if verdict.correct and verdict.expert_latency is not None:
            lines.append(f"expert ({verdict.expert}) beside it: {figures.latency(verdict.expert_latency)}")
            lines.append(f"relative error: {verdict.accuracy()}")
        left = self._patience.left(self._state.evaluations)
        lines.append(f"{figures.amount(left, 'evaluation')} left without an improvement")
        if verdict.output:
            lines += ["what it printed when it was built and called on public inputs:", verdict.output]
        return "\n".join(lines)

    def close(self) -> None:
        self._socket.close()
        owners.remove_folder(self.folder)


def _arguments(client: socket.socket) -> list[str] | None:
    """The words after `evaluate`; None when what came within REQUEST_LIMIT is no request."""
    data, end = b"", time.monotonic() + REQUEST_LIMIT
    try:
        while not data.endswith(b"\n") and len(data) < REQUEST_CAP and (left := end - time.monotonic()) > 0:
            client.settimeout(left)
            piece = client.recv(4096)
            if not piece:
                break
            data += piece
        words = json.loads(data)["arguments"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None
