"""The worker protocol under measurement: the judge's clock, and what the rule of improvement makes of noise.

    python benchmarks/worker_protocol.py clock                     no-op and spinning solutions (2 minutes)
    python benchmarks/worker_protocol.py improvements [-n 30]      the same solution against itself, whole evaluations
    python benchmarks/worker_protocol.py gains [-n 20]             a champion that is 5 % slower: is the gain found?

The last two judge as a run here would, by the rule that is certified on this machine; --rule default takes the one of
no machine. Run as root on an idle machine. Every figure is printed with what it is compared with.
"""

import argparse
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from justgoal.evaluation import certificate
from justgoal.evaluation.certificate import PROBES, SPIN
from justgoal.evaluation.evaluator import compute_environment
from justgoal.evaluation.improvement import DEFAULT_RULE, Rule
from justgoal.sandboxes.gpus import Gpu

SPINS = (0.0002, 0.001, 0.01, 0.1)
SLOWER = """
import time
import {module} as inner


def run(*arguments):
    begun = time.perf_counter()
    result = inner.run(*arguments)
    end = begun + {factor} * (time.perf_counter() - begun)
    while time.perf_counter() < end:
        pass
    return result
"""
LATER = """
import time
import {module} as inner


def run(*arguments):
    result = inner.run(*arguments)
    end = time.perf_counter() + {seconds}
    while time.perf_counter() < end:
        pass
    return result
"""


def with_judge(body: Callable[[socket.socket], None], gpu: Gpu | None = None) -> None:
    """Run `body` where the judge would be: it asks for workers over the socket that it is given."""
    from justgoal.evaluation.evaluator import WorkerHost
    from justgoal.sandboxes.bubblewrap import Bubblewrap

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host = WorkerHost(Bubblewrap(), gpu=gpu)

    def judge() -> None:
        try:
            body(theirs)
        finally:
            theirs.close()

    thread = threading.Thread(target=judge)
    thread.start()
    try:
        host.serve(ours)
    finally:
        thread.join()
        host.close()


def clock() -> None:
    """20 medians of 20 no-ops; then, for each spinning solution, its median with the window's cost subtracted."""
    import torch

    from justgoal.evaluation.bench import BLANK_LIMIT, FIRST_CALL_LIMIT
    from justgoal.evaluation.clock import Flush, cost, undisturbed, warm_up
    from justgoal.evaluation.evaluator import BLANK, threads
    from justgoal.evaluation.memory import Field, sealed
    from justgoal.evaluation.workers import IMPORT_LIMIT, Worker, Workers

    flush, data = Flush(threads()), torch.randn(1 << 20)
    seconds_field = [Field("seconds", "float64", (1,))]

    def body(runtime: socket.socket) -> None:
        workers = Workers(runtime, [Field("x", "float32", (1 << 20,))], [Field("y", "float32", (1,))], threads())
        started = workers.start([sealed(tar(SPIN.format(seconds=seconds).encode())) for seconds in SPINS])
        [blank] = Workers(runtime, seconds_field, seconds_field, threads()).start([sealed(tar(BLANK))])
        for worker in [blank, *started]:
            worker.imported(IMPORT_LIMIT)

        def call(worker: Worker) -> float:
            worker.inputs.write([data])
            flush()
            return worker.call(FIRST_CALL_LIMIT)

        def window(seconds: float) -> float:
            started[0].inputs.write([data])
            flush()
            return cost(blank, min(seconds, BLANK_LIMIT))

        workers.keep_awake().thaw()
        time.sleep(1.0)
        with undisturbed():
            warm_up(blank)
            medians = [statistics.median(window(0.0) for _ in range(20)) for _ in range(20)]
        low, high = min(medians), max(medians)
        print("no-op, 4 MB of input, median of 20 calls, repeated 20 times (us)")
        print(f"  median {statistics.median(medians) * 1e6:.1f}   lowest {low * 1e6:.1f}   highest {high * 1e6:.1f}   "
              f"range {(high - low) * 1e6:.1f}\n")  # fmt: skip
        print("spinning solutions, median of rounds, the cost of a window beside them subtracted")
        print(f"{'spins':>10} {'measured':>12} {'error':>10} {'error':>8}")
        for seconds, worker in zip(SPINS, started, strict=True):
            call(worker)
            with undisturbed():
                warm_up(blank)
                rounds = [(call(worker), window(seconds)) for _ in range(20 if seconds < 0.05 else 9)]
            found = statistics.median(took for took, _ in rounds) - statistics.median(cost for _, cost in rounds)
            print(f"{seconds * 1e3:>7g} ms {found * 1e3:>9.4f} ms {(found - seconds) * 1e6:>+7.1f} us "
                  f"{100 * (found / seconds - 1):>+6.2f} %")  # fmt: skip
        for worker in [blank, *started]:
            worker.close()

    with_judge(body)


def improvements(count: int, rule: Rule) -> None:
    """The same solution judged `count` times against itself as champion, by the whole rule."""
    print(f"{'operator':<10} {'evaluations':>11} {'improved':>9} {'first pair off by':>18} {'seconds each':>13}")
    for probe, evaluator in _evaluators(rule):
        solution = _eager(probe)
        evaluator.evaluate(solution)
        begun = time.monotonic()
        verdicts = [evaluator.evaluate(solution) for _ in range(count)]
        each = (time.monotonic() - begun) / count
        off = statistics.median(abs(verdict.ratios[0] - 1) for verdict in verdicts)
        improved = sum(verdict.improved for verdict in verdicts)
        print(f"{probe.name:<10} {count:>11} {improved:>9} {100 * off:>16.2f} % {each:>13.1f}", flush=True)


def gains(count: int, rule: Rule, gain: float = 0.05) -> None:
    """A champion whose calls take longer by `gain`, copying of outputs included: how often the faster one is found."""
    from justgoal.evaluation.collect import Solution
    from justgoal.evaluation.improvement import Ratchet

    print(f"{'operator':<10} {'evaluations':>11} {'found':>6} {'ratio of first pair':>20} {'seconds each':>13}")
    for probe, evaluator in _evaluators(rule):
        fast = _eager(probe)
        first = evaluator.evaluate(fast)
        assert first.latency is not None and first.speedup is not None and first.resolution is not None
        slow = Solution({"solution.py": LATER.format(module="eager", seconds=gain * first.latency).encode(),
                         "eager.py": fast.contents["solution.py"]})  # fmt: skip
        mark = Ratchet().after(first.speedup / (1 + gain), first.resolution, 1.0).mark
        found, ratios, seconds = 0, [], 0.0
        for _ in range(count):
            evaluator.crown(slow, mark)
            begun = time.monotonic()
            verdict = evaluator.evaluate(fast)
            seconds += time.monotonic() - begun
            found += verdict.improved
            ratios.append(verdict.ratios[0])
        pair = statistics.median(ratios)
        print(f"{probe.name:<10} {count:>11} {found:>6} {pair:>19.3f}x {seconds / count:>13.1f}", flush=True)


def _rule(name: str) -> Rule:
    """The certified one (which is measured now unless there is one of today), or the default."""
    from justgoal.evaluation.device import Device
    from justgoal.sandboxes.bubblewrap import Bubblewrap

    with Device().exclusive():
        rule = DEFAULT_RULE if name == "default" else certificate.current(Bubblewrap(), "cpu").rule
    print(f"{name} rule: {rule.pairs} pairs, each above {100 * rule.minimum_gain:.2f} %\n")
    return rule


def _evaluators(rule: Rule):  # type: ignore[no-untyped-def]
    from justgoal.evaluation.device import Device
    from justgoal.evaluation.evaluator import Evaluator
    from justgoal.sandboxes.bubblewrap import Bubblewrap
    from justgoal.tasks import contract

    for probe in PROBES:
        evaluator = Evaluator(contract.task(str(probe)), Bubblewrap())
        try:
            with Device().exclusive():
                evaluator.open(rule=rule)
                yield probe, evaluator
        finally:
            evaluator.close()


def _eager(probe: Path):  # type: ignore[no-untyped-def]
    from justgoal.evaluation.collect import collect

    return collect(probe / "experts" / "eager")


def tar(source: bytes) -> bytes:
    from justgoal.evaluation.collect import Solution

    return Solution({"solution.py": source}).tar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clock", "improvements", "gains"))
    parser.add_argument("-n", type=int, default=0, help="evaluations per operator (30 and 20 by default)")
    parser.add_argument("--rule", choices=("certified", "default"), default="certified")
    given = parser.parse_args()
    os.environ.update(compute_environment())  # as a judge's, before torch is imported
    if given.what == "clock":
        clock()
    elif given.what == "improvements":
        improvements(given.n or 30, _rule(given.rule))
    else:
        gains(given.n or 20, _rule(given.rule))


if __name__ == "__main__":
    main()
