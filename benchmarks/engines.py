"""Does a measured speedup depend on the engine? One solution judged under Docker and under bubblewrap, in turns.

    python benchmarks/engines.py [-n 5]      (5 evaluations under each; about 4 minutes)

The solution is the champion of the committed recording. Beside the difference stands the smallest gain that is
certified on this machine: what is below it cannot be told from noise. Run as root on an idle machine.
"""

import argparse
import json
import statistics
from contextlib import closing
from pathlib import Path

from justgoal.evaluation import certificate
from justgoal.evaluation.collect import collect
from justgoal.evaluation.device import Device
from justgoal.evaluation.evaluator import Evaluator
from justgoal.sandboxes import engines
from justgoal.tasks import contract

RECORDING = Path(__file__).parents[1] / "runs" / "gated_delta_net_prefill-recorded"
NAMES = ("docker", "bubblewrap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5)
    count: int = parser.parse_args().n
    champion = json.loads((RECORDING / "result.json").read_text())["champion"]
    solution = collect(RECORDING / "solutions" / str(champion))
    speedups: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(count):
        for name in NAMES if number % 2 else reversed(NAMES):
            with closing(engines.choose(name)) as engine, Device().exclusive():
                certified = certificate.current(engine, "cpu")
                with closing(Evaluator(contract.task("gated_delta_net_prefill"), engine)) as evaluator:
                    evaluator.open(only="eager")
                    verdict = evaluator.final(solution)
            assert verdict.speedup is not None
            speedups[name].append(verdict.speedup)
            print(f"{name:<12} {verdict.sentence()}", flush=True)
    docker, bubblewrap = (statistics.median(speedups[name]) for name in NAMES)
    print(f"\nmedians {docker:.3f}x and {bubblewrap:.3f}x: they differ by {100 * abs(docker / bubblewrap - 1):.1f} %; "
          f"gains are told apart here from {100 * certified.smallest_gain:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
