"""`justgoal tasks check`: does the judge of a task catch what is known to be wrong? A table for each task."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby

from justgoal import figures
from justgoal.errors import UsageError
from justgoal.evaluation import strength
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator
from justgoal.evaluation.strength import Planted, Strength
from justgoal.listing import columns
from justgoal.sandboxes import Engine, engines
from justgoal.tasks import contract
from justgoal.tasks.contract import Task
from justgoal.terminal import View


def check(text: str | None, view: View, engine: engines.Name | None = None, image: str | None = None) -> None:
    """One task, all of an operator, or all of the catalogue; raises UsageError when one is too weak to run."""
    operators = [contract.tasks(name) for name in ([text] if text else contract.names())]
    with closing(engines.choose(engine, image)) as chosen:
        weak = [problem for tasks in operators for problem in _operator(tasks, chosen, view)]
    if weak:
        more = f", and {len(weak) - 1} more" if len(weak) > 1 else ""
        raise UsageError(f"too weak to run: {weak[0]}{more}")


def _operator(tasks: Sequence[Task], engine: Engine, view: View) -> list[str]:
    """Some tasks of one operator."""
    found, weak = [], []
    for task in tasks:
        with view:
            view.begin()
            view.status("waiting for the device")
            with (
                Device().exclusive(),
                closing(Evaluator(task, engine, lambda phase: view.status(phase))) as judge,
            ):
                found.append(strength.measure(task, judge))
            view.header([*table(found[-1]), ""])
        weak += [f"{task.name}: {weakness}" for weakness in found[-1].weaknesses]
    if len(tasks) == len(tasks[0].operator.workloads):
        same = [f"{tasks[0].operator.name}: {problem}" for problem in strength.alike(found)]
        view.header([f"weak: {problem}" for problem in same])
        weak += same
    return weak


def table(found: Strength) -> Iterator[str]:
    """All that was found about one task."""
    yield found.task
    yield "kinds of inputs"
    yield from columns([(str(number), kind) for number, kind in enumerate(found.kinds, start=1)])
    yield "experts"
    yield from columns([(name, reason or "accepted") for name, reason in found.experts.items()])
    yield "outputs on random inputs"
    yield from columns([(one["name"], _range(one)) for one in found.outputs])
    yield "planted errors"
    yield from columns([("", "caught by", "allclose(1e-2)", ""), *(_row(found, one) for one in found.planted)])
    yield from (f"weak: {weakness}" for weakness in found.weaknesses)
    yield figures.strength(**found.summary())


def _range(output: dict[str, float]) -> str:
    return f"{output['low']:.3g} to {output['high']:.3g}, another seed changes {figures.percent(output['differs'])}"


def _row(found: Strength, one: Planted) -> tuple[str, str, str, str]:
    other = found.like(one)
    note = (
        "survives" if not one.failing
        else "trivial, not counted" if found.trivial(one)
        else f"as {other.label}, not counted" if other
        else ""
    )  # fmt: skip
    every = len(one.failing) == len(found.kinds)
    return one.label, "all" if every else ranges(one.failing) or "none", "passes" if one.loose else "fails", note


def ranges(indices: Sequence[int]) -> str:
    """Numbers counted from one: `1-4 7`."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0])]
    return " ".join(
        f"{a[1] + 1}-{b[1] + 1}" if a != b else f"{a[1] + 1}" for a, *_, b in ([*run, run[-1]] for run in runs)
    )
