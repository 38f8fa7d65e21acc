"""One run, assembled: from its options to its end. The same call starts a run, goes on with it, or says how it ended.

Nothing is written before everything that can be wrong with the options is known to be right.
"""

import dataclasses
import json
import math
import os
import platform
import re
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from justgoal import __version__, events, figures, machine, models, owners, resources
from justgoal import goal as goals
from justgoal.agent import run_agent
from justgoal.errors import EvaluatorFailed, Fatal, Refused, Resumable, SandboxLost, StopRun, UsageError
from justgoal.evaluation import certificate, strength
from justgoal.evaluation.certificate import Certificate
from justgoal.evaluation.collect import InvalidSolution, collect
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator, compute_environment, memory, threads
from justgoal.evaluation.gate import Court, Gate
from justgoal.evaluation.improvement import Ratchet, Rule, gain
from justgoal.evaluation.verdict import ExpertReport, Verdict
from justgoal.events import (
    Final,
    Goal,
    Paused,
    Resumed,
    RunStarted,
    Stopped,
)  # fmt: skip
from justgoal.models import Model
from justgoal.narrator import Narrator
from justgoal.sandboxes import UID, Engine, Limits, engines, gpus
from justgoal.sandboxes.disk import DiskWatch
from justgoal.sandboxes.mounts import agent_folder, stage_tree
from justgoal.sandboxes.shell import Shell, agent_spec
from justgoal.state import EXIT_CODES, State
from justgoal.stopping import Budgets, Patience
from justgoal.storage import write_json
from justgoal.tasks import contract, handout
from justgoal.terminal import View, harmless
from justgoal.tools import Tools
from justgoal.transcript import Transcript

FORMAT = 2
"""Version of the run folder; a run of another one is not gone on with."""
DEVICE = "cpu"
AGENT_PIDS = 2048
AGENT_DISK = 4 << 30


@dataclass(frozen=True)
class RunOptions:
    model: str
    task: str
    name: str | None
    runs: Path
    base_url: str | None
    language: str
    patience: int | None
    max_hours: float | None
    max_turns: int | None
    engine: engines.Name | None = None
    image: str | None = None


# -------------------------------------------------------------------- justgoal run


def run(options: RunOptions, view: View) -> int:
    """Start, or go on with, the run that the options name; returns its exit code."""
    task = contract.task(options.task)
    _admit(task, DEVICE)
    key = os.environ.get("ANTHROPIC_API_KEY")
    model = models.parse(options.model, base_url=options.base_url, api_key=key, runs=options.runs)
    recording: dict[str, Any] | None = getattr(model, "run_json", None)
    if recording and recording.get("task", task.name) != task.name:
        raise UsageError(f"{model.name} is a run of {recording['task']}, not of {task.name}")
    if options.max_hours is not None and not math.isfinite(options.max_hours):
        raise UsageError(f"--max-hours {options.max_hours:g} is no number of hours")
    patience = Patience(options.patience or (recording or {}).get("patience") or 20)
    prompts = resources.prompts()
    goal = goals.render(
        prompts, options.language, operator=task.operator.name, workload=task.workload.name, device=DEVICE,
        patience=patience.limit,
    )  # fmt: skip
    words = goals.words(prompts)
    name = options.name or _run_name(task.name, options.model)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise UsageError(f"--name {name!r} must be letters, digits, dots, dashes and underscores, 200 at most")
    folder = options.runs / name
    earlier = _earlier(folder, task, model.name, goal, options)
    if earlier and earlier.status not in ("running", "interrupted"):
        view.header([f"justgoal run {task.name} with {model.name}", f"  run folder   {folder}"])
        if not (folder / "result.json").exists():
            _write_result(folder, earlier)
        Narrator(view, earlier, patience).ending(earlier.status, earlier.detail)
        return _finish(earlier, view, folder)
    engine = _engine(options, earlier)
    with ExitStack() as stack:
        stack.callback(model.close)
        stack.callback(engine.close)
        stack.enter_context(view)
        view.header(_title(task.name, model, folder, engine, recording))
        view.begin(earlier.active_seconds if earlier else 0.0)
        device = Device(DEVICE)
        with device.exclusive():
            evaluator = Evaluator(task, engine, lambda phase: view.status(phase))
            stack.callback(evaluator.close)
            checked = _strength(earlier, task, options.task, evaluator, recorded=recording is not None)
            if checked:
                view.header([f"  check        {figures.strength(**checked)}"])
            noise = _noise(earlier, engine, view)
            view.header([f"  noise        {noise.sentence()}"])
            report = evaluator.open(earlier.run["expert"]["chosen"] if earlier else None, noise.rule)
        if not earlier:
            noise.admit(task.name, report)
        description = _describe(options, task, model, goal, patience, engine, checked, noise, report)
        folder.mkdir(parents=True, exist_ok=True)
        state = State()
        transcript = Transcript.open(folder / "events.jsonl", state.apply)
        stack.callback(transcript.close)
        narrator = Narrator(view, state, patience)
        transcript.watch(narrator)
        rule = f"stops after {patience.limit} evaluations without an improvement"
        view.header([f"  expert       {report.summary()}", f"  goal         {goal.language}, 4 sentences, {rule}"])
        if earlier:
            transcript.write(Resumed("the same command was given again"))
        else:
            write_json(folder / "run.json", description)
            transcript.write(RunStarted(description))
        session = Session(folder, task, model, goal, words, patience, options, evaluator, noise.rule, report, device,
                          transcript, state, view, recording is not None)  # fmt: skip
        session.work(engine)
        return _finish(state, view, folder)


@dataclass
class Session:
    """A run between its first event in this process and its last."""

    folder: Path
    task: contract.Task
    model: Model
    goal: Goal
    words: goals.Words
    patience: Patience
    options: RunOptions
    evaluator: Evaluator
    rule: Rule
    report: ExpertReport
    device: Device
    transcript: Transcript
    state: State
    view: View
    recorded: bool

    def work(self, engine: Engine) -> None:
        """Let the model work until something ends the run, and write down what and how it ended."""
        court = Court(self.folder, self.evaluator, self.device, self.transcript, self.state)
        try:
            self._take_up(court)
            with ExitStack() as stack:
                tools = self._sandbox(stack, engine, court)
                budgets = Budgets(self.options.max_hours, self.options.max_turns)
                run_agent(
                    self.model, tools, self.transcript, self.state, self._enforced(), budgets, self.goal, self.words,
                    self._before_request, self.evaluator.pause,
                )  # fmt: skip
        except StopRun as stop:
            self._end(stop.status, stop.detail)
        except Refused as error:
            self._end("refused", str(error))
        except KeyboardInterrupt:
            self.transcript.write(Paused("interrupted by the user"))
        except (Resumable, EvaluatorFailed, SandboxLost) as error:
            if isinstance(error, SandboxLost):
                self.transcript.write(events.SandboxLost(str(error)))
            self.transcript.write(Paused(str(error)))
        except Fatal as error:
            self._end("failed", str(error))

    def _enforced(self) -> Patience:
        """A recording is played to its end, so that all of it is judged again; the summary applies the rule."""
        return Patience(sys.maxsize) if self.recorded else self.patience

    def _before_request(self) -> None:
        self.view.status("model is thinking")
        self.evaluator.prepare()

    def _take_up(self, court: Court) -> None:
        """What an earlier process of this run left: its champion, and an evaluation that it did not finish."""
        if self.state.champion is not None:
            champion = collect(self.folder / "solutions" / str(self.state.champion))
            court.keep_champion(self.state.champion)
            with self.device.exclusive():
                self.evaluator.crown(champion, self._ratchet().mark)
        if self.state.evaluating is not None:
            verdict = court.again()
            told = f"{self.words.interrupted}\nevaluation {verdict.number}: {verdict.sentence()}"
            self.words = dataclasses.replace(self.words, interrupted=told)

    def _ratchet(self) -> Ratchet:
        """As the judge of the earlier processes had it."""
        ratchet = Ratchet()
        for verdict in map(Verdict.from_json, self.state.evaluations):
            if verdict.improved and verdict.speedup is not None and verdict.resolution is not None:
                ratchet = ratchet.after(verdict.speedup, verdict.resolution, gain(verdict.ratios))
        return ratchet

    def _sandbox(self, stack: ExitStack, engine: Engine, court: Court) -> Tools:
        """Sandbox A with its workspace, its task, and its way to `evaluate`."""
        workspace = agent_folder(self.folder, UID)
        gate = Gate(
            court, self.state, self.patience, self.report, UID, lambda phase: self.view.status(phase),
            endless=self.recorded,
        )  # fmt: skip
        stack.callback(gate.close)
        made = owners.make_folder("task")
        stack.callback(owners.remove_folder, made)
        material = made / "task"
        handout.write(self.task, self.goal.text, self.report.chosen, self.rule.terms(), resources.prompts(), material)
        limits = Limits(memory(4), AGENT_PIDS, threads(), AGENT_DISK)
        spec = agent_spec(workspace, stage_tree(material), gate.folder, limits, UID, compute_environment())
        try:
            with self.device.exclusive():  # nobody's window is open while it starts, and the next one finds it
                sandbox = engine.start(spec)
                stack.callback(sandbox.close)
                entry = self.device.register(sandbox.freezer)
        except Fatal as error:
            raise SandboxLost(str(error)) from error
        stack.callback(entry.unlink, missing_ok=True)
        disk = stack.enter_context(DiskWatch(workspace, AGENT_DISK, sandbox.freezer))
        return Tools(Shell(sandbox, gate, lambda: self.device.release_stale(sandbox.freezer), disk))

    def _end(self, status: str, detail: str) -> None:
        """Judge the champion afresh, then stop; the speedup that is reported comes from here alone."""
        final: Final | None = None
        champions = [v["number"] for v in self.state.evaluations if v["improved"]]
        try:
            for number in reversed(champions):
                self.view.status("judging the champion afresh")
                with self.device.exclusive():
                    verdict = self.evaluator.final(collect(self.folder / "solutions" / str(number)))
                final = Final(verdict.to_json(), number)
                if verdict.correct:
                    break
        except (EvaluatorFailed, InvalidSolution) as error:
            self.transcript.write(Paused(f"the final evaluation failed: {error}"))
            return
        except KeyboardInterrupt:
            self.transcript.write(Paused("interrupted during the final evaluation"))
            return
        self.transcript.write(final or Final(None, None))
        self.transcript.write(Stopped(status, detail))
        _write_result(self.folder, self.state)


def _write_result(folder: Path, state: State) -> None:
    """result.json, all of which the transcript says too."""
    final = state.final or Final(None, None)
    write_json(
        folder / "result.json",
        {
            "status": state.status,
            "detail": state.detail,
            "evaluations": len(state.evaluations),
            "champion": final.champion,
            "final": final.verdict,
            "patience_ended_at": Patience(int(state.run["patience"])).ended_at(state.evaluations),
            "last_hash": state.last_hash,
        },
    )


def _finish(state: State, view: View, folder: Path) -> int:
    """The last lines, and the exit code."""
    if state.status == "recording_ended":
        patience = Patience(int(state.run["patience"]))
        ended = patience.ended_at(state.evaluations)
        left = patience.left(state.evaluations)
        rule = f"the patience rule of {patience.limit}"
        view.line(
            f"{rule} would have ended it after evaluation {ended}" if ended
            else f"{rule} would not have ended it yet: {figures.amount(left, 'evaluation')} left"
        )  # fmt: skip
    if state.status == "interrupted":
        view.line("the same command goes on with this run")
    view.line(f"justgoal show {folder}")
    return EXIT_CODES[state.status]


# -------------------------------------------------------------------- what defines a run


def _admit(task: contract.Task, device: str) -> None:
    if device not in task.operator.devices:
        raise UsageError(f"{task.name} is not for {device}: its operator names {', '.join(task.operator.devices)}")


def _earlier(folder: Path, task: contract.Task, model: str, goal: Goal, options: RunOptions) -> State | None:
    """The state of the run in this folder; None where there is none. Raises UsageError when it is another run's."""
    path = folder / "events.jsonl"
    if not path.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is no run: give another --name")
        return None
    state = State()
    with_lock = Transcript.open(path, state.apply)
    with_lock.close()
    if not state.run:
        return None  # its process was killed before it had written anything
    wanted = {"format": FORMAT, "task": task.name, "task_sha256": task.sha256, "model": model, "goal": goal.sha256,
              "processor": machine.processor()[0], "cores": threads(), "uid": UID}  # fmt: skip
    if options.engine is not None:
        wanted["engine"] = options.engine
    for field, value in wanted.items():
        found = state.run.get(field)
        if found != value:
            raise UsageError(f"{folder} is a run with {field} {found!r}, not {value!r}: give another --name")
    return state


def _strength(
    earlier: State | None, task: contract.Task, called: str, evaluator: Evaluator, *, recorded: bool
) -> dict[str, int] | None:
    """Which planted errors the task's judge catches; too weak a task is refused. A run that goes on was checked.

    A recording is judged anew to be seen, not to be believed: it waits for no check.
    """
    if earlier:
        return earlier.run.get("strength")
    found = strength.stored(task) if recorded else strength.current(task, evaluator)
    if found is None:
        return None
    found.admit(called)
    return found.summary()


def _noise(earlier: State | None, engine: Engine, view: View) -> Certificate:
    """The certificate of this device. A run that goes on keeps its own, and so its rule."""
    if earlier:
        return Certificate(**earlier.run["noise"])
    view.status("measuring the noise of this machine")
    return certificate.current(engine, DEVICE)


def _engine(options: RunOptions, earlier: State | None) -> Engine:
    """A run goes on with the engine and the image that it began with."""
    begun = earlier.run if earlier else {}
    return engines.choose(options.engine or begun.get("engine"), options.image or begun.get("image"))


def _describe(
    options: RunOptions, task: contract.Task, model: Model, goal: Goal, patience: Patience, engine: Engine,
    checked: dict[str, int] | None, noise: Certificate, report: ExpertReport,
) -> dict[str, Any]:  # fmt: skip
    """run.json: all that defines the run, without a name or a path of this host."""
    processor, features = machine.processor()
    limits = {"memory": memory(4), "pids": AGENT_PIDS, "cores": threads(), "disk": AGENT_DISK}
    return {
        "format": FORMAT,
        "justgoal": __version__,
        "task": task.name,
        "task_sha256": task.sha256,
        "model": model.name,
        "parameters": dict(model.parameters),
        "own_server": options.base_url is not None,
        "goal": goal.sha256,
        "language": goal.language,
        "prompts": _prompt_hashes(),
        "patience": patience.limit,
        "max_hours": options.max_hours,
        "max_turns": options.max_turns,
        "device": DEVICE,
        "processor": processor,
        "cores": threads(),
        "features": features,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "engine": engine.name,
        "engine_version": engine.version,
        "image": engine.image,
        "uid": UID,
        "limits": limits if engine.limited else "weak",
        "strength": checked,
        "noise": noise.to_json(),
        "expert": report.to_json(),
    }


def _prompt_hashes() -> dict[str, str]:
    files = sorted(path for path in resources.prompts().iterdir() if path.is_file())
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files}


def _title(task: str, model: Model, folder: Path, engine: Engine, recording: dict[str, Any] | None) -> list[str]:
    limits = "" if engine.limited else ", weak limits"
    lines = [
        f"justgoal run {task} with {model.name}",
        f"  run folder   {folder}",
        f"  sandbox      {engine.name} {engine.version}, uid {UID}, no network{limits}",
    ]
    if recording is not None:
        lines.append(f"  recording    of {recording.get('model')} on {recording.get('processor')}")
        transcript = (getattr(model, "folder", Path()) / "events.jsonl").read_text(errors="replace")
        if missing := machine.missing_features(transcript):
            lines.append(
                f"  warning      its solutions use {', '.join(missing)}, which this processor lacks: they will crash"
            )
    return lines


def _run_name(task: str, model: str) -> str:
    """Letters, digits, dots, dashes and underscores; ends with the time, so that it is new."""
    stem = f"{task.replace('/', '-')}-{model.replace(':', '-').replace('/', '-')}"
    return f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


# -------------------------------------------------------------------- justgoal evaluate


def evaluate(
    solution: Path,
    task_name: str,
    as_json: bool,
    engine_name: engines.Name | None = None,
    image: str | None = None,
    device: str = DEVICE,
) -> int:
    """Judge a solution folder as in a run, without an agent; prints the verdict. Exit code 0 when it is correct."""
    task = contract.task(task_name)
    _admit(task, device)
    gpu = gpus.first() if device == "cuda" else None
    try:
        found = collect(solution)
    except InvalidSolution as problem:
        raise UsageError(f"{solution} is no solution: {problem}") from None
    if not found.mentions_run():
        raise UsageError(f"{solution} is no solution: solution.py defines no function run")
    with (
        closing(engines.choose(engine_name, image)) as engine,
        closing(Evaluator(task, engine, gpu=gpu)) as evaluator,
        Device(device).exclusive(),
    ):
        noise = certificate.current(engine, device, gpu)
        if not as_json:
            print(f"noise        {noise.sentence()}", flush=True)
        report = evaluator.open(rule=noise.rule)
        noise.admit(task.name, report)
        if not as_json:
            print(harmless(f"expert       {report.summary()}"), flush=True)
        verdict = evaluator.evaluate(found)
    if as_json:
        print(json.dumps({"task": task.name, "noise": noise.to_json(), "expert": report.to_json(),
                          "verdict": verdict.to_json()}, indent=1))  # fmt: skip
    else:
        over = " over the expert" if verdict.correct else ""
        print(harmless(f"{verdict.sentence()}{over}\n{verdict.output}".strip()))
    return 0 if verdict.correct else 1
