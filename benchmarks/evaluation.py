"""How long an evaluation takes with a warm expert, and how much memory the runtime process needs.

    python benchmarks/evaluation.py [OPERATOR[/WORKLOAD]]      (gated_delta_net_prefill by default; about 5 minutes)

Solutions are made from the eager expert: one whose output is off by 0.1 %, one that takes three times as long, and one
that is judged beside a champion which takes 1.5 times as long. Before each there are ten seconds in which a run would
wait for the model, and in which secret inputs are prepared; `draws` is what was left of that. Run as root on an idle
machine.
"""

import subprocess
import sys
import time

from worker_protocol import SLOWER

from justgoal.evaluation.collect import Solution, collect
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator
from justgoal.sandboxes.bubblewrap import Bubblewrap
from justgoal.tasks import contract

THINKING = 10.0
WRONG = """
import eager


def run(*arguments):
    first, *rest = eager.run(*arguments)
    return (first * 1.001, *rest)
"""
MEMORY = """
import justgoal.run, justgoal.models.anthropic, sys
assert "torch" not in sys.modules and "numpy" not in sys.modules
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def main() -> None:
    task = contract.task(sys.argv[1] if len(sys.argv) > 1 else "gated_delta_net_prefill")
    [eager] = [collect(expert.folder) for expert in task.operator.experts if expert.name == "eager"]
    source = eager.contents["solution.py"]

    def around(wrapper: str) -> Solution:
        return Solution({"solution.py": wrapper.encode(), "eager.py": source})

    slow, slower = (around(SLOWER.format(module="eager", factor=factor)) for factor in (1.5, 3.0))
    evaluator = Evaluator(task, Bubblewrap())
    try:
        with Device().exclusive():
            print(f"{task.name}: expert {evaluator.open().summary()}\n")
            print(f"{'solution':<18} {'verdict':<38} {'build':>7} {'draws':>7} {'pairs':>7}   judged in")
            evaluator.evaluate(eager)
            for name, champion, solution in (
                ("wrong", eager, around(WRONG)), ("clearly slower", eager, slower), ("an improvement", slow, eager),
            ):  # fmt: skip
                evaluator.crown(champion, 0.0)
                evaluator.prepare()
                time.sleep(THINKING)
                evaluator.pause()
                verdict = evaluator.evaluate(solution)
                took = verdict.seconds
                judged = took.get("draws", 0.0) + took.get("pairs", 0.0)
                sentence = verdict.sentence().split(",")[0][:30] + (", improved" if verdict.improved else "")
                print(f"{name:<18} {sentence:<38} {took['build']:>5.1f} s {took.get('draws', 0.0):>5.1f} s "
                      f"{took.get('pairs', 0.0):>5.1f} s   {judged:.1f} s", flush=True)  # fmt: skip
    finally:
        evaluator.close()
    peak = int(subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout)
    print(f"\nruntime process with everything imported: {peak / 1024:.0f} MB")


if __name__ == "__main__":
    main()
