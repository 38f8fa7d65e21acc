"""The worker protocol on a CUDA device: the device's time, how far the judge's clock bears it out, and null pairs.

    python benchmarks/cuda_protocol.py clock           solutions that spin on the device (2 minutes)
    python benchmarks/cuda_protocol.py null [-n 12]    an operator against itself in fresh processes (1 to 2 minutes)

Run as root on an idle GPU. Every figure is printed with what it is compared with.
"""

import argparse
import os
import socket
import statistics
from collections.abc import Sequence
from itertools import combinations

from worker_protocol import tar, with_judge

from justgoal.evaluation.certificate import CUDA_SPIN
from justgoal.evaluation.evaluator import CUDA_BLANK, compute_environment
from justgoal.sandboxes import gpus

SPINS = (0.00002, 0.0001, 0.001, 0.01)
ROUNDS = 40
BLOCKS = 10
MEGABYTES = (1, 64)
OPERATORS = {
    "rms_norm 512x8192 bf16": ("bfloat16", (512, 8192), "torch.nn.functional.rms_norm(x, (8192,))"),
    "rms_norm 8192x8192 bf16": ("bfloat16", (8192, 8192), "torch.nn.functional.rms_norm(x, (8192,))"),
    "mm 2048 bf16": ("bfloat16", (2048, 2048), "x @ x"),
    "softmax 1024x4096 fp32": ("float32", (1024, 4096), "x.softmax(1)"),
}


def clock() -> None:
    """For several sizes of input: what spinning solutions are measured as, and what the judge's clock adds to that."""
    import torch

    from justgoal.evaluation.clock import undisturbed
    from justgoal.evaluation.devices import Reading
    from justgoal.evaluation.devices.cuda import CudaHardware
    from justgoal.evaluation.evaluator import threads
    from justgoal.evaluation.memory import Field, sealed
    from justgoal.evaluation.workers import IMPORT_LIMIT, Worker, Workers

    def body(runtime: socket.socket) -> None:
        hardware = CudaHardware()
        awake = Workers(runtime, [], [], threads()).keep_awake()
        for megabytes in MEGABYTES:
            fields = [Field("x", "float32", (megabytes << 18,))]
            workers = Workers(runtime, fields, fields, threads(), hardware.worker)
            data = torch.randn(megabytes << 18, device="cuda")
            spinning = workers.start([sealed(tar(CUDA_SPIN.format(seconds=s).encode())) for s in SPINS])
            blank = hardware.blank(workers, sealed(tar(CUDA_BLANK)))
            for worker in (blank, *spinning):
                worker.imported(IMPORT_LIMIT)

            def call(worker: Worker, data: torch.Tensor = data) -> Reading:
                worker.inputs.write([data])
                worker.outputs.poison()
                hardware.flush()
                return hardware.read(worker, worker.call(IMPORT_LIMIT))

            def cost(seconds: float, worker: Worker, blank: Worker = blank, data: torch.Tensor = data) -> Reading:
                worker.inputs.write([data])
                hardware.flush()
                return hardware.cost(blank, seconds)

            for worker in spinning:
                call(worker)
            awake.thaw()
            print(f"\ninput and output of {megabytes} MB, medians of {ROUNDS} calls, repeated {BLOCKS} times (us)")
            print(f"{'spins':>8} {'window':>9} {'range':>7} {'claimed':>10} {'range':>7} {'error':>7} {'hidden':>8} "
                  f"{'lowest':>8} {'highest':>8}")  # fmt: skip
            for seconds, worker in zip(SPINS, spinning, strict=True):
                windows, claims, hidden = list[float](), list[float](), list[float]()  # microseconds
                for _ in range(BLOCKS):
                    with undisturbed():
                        hardware.warm_up(blank)
                        rounds = [(call(worker), cost(seconds, worker)) for _ in range(ROUNDS)]
                    empty = _median([cost.seconds for _, cost in rounds])
                    windows.append(_median([reading.window for reading, _ in rounds]))
                    claims.append(_median([reading.seconds for reading, _ in rounds]) - empty)
                    beyond = _median([reading.window - reading.seconds for reading, _ in rounds])
                    hidden.append(beyond - _median([cost.window - cost.seconds for _, cost in rounds]))
                window, claimed, rest = map(statistics.median, (windows, claims, hidden))
                print(f"{seconds * 1e6:>8.0f} {window:>9.1f} {max(windows) - min(windows):>7.1f} {claimed:>10.2f} "
                      f"{max(claims) - min(claims):>7.2f} {claimed - seconds * 1e6:>+7.2f} {rest:>+8.1f} "
                      f"{min(hidden):>+8.1f} {max(hidden):>+8.1f}", flush=True)  # fmt: skip
            awake.freeze()
            for worker in (blank, *spinning):
                worker.close()

    with_judge(body, gpus.first())


def null(count: int) -> None:
    """`count` fresh processes of the same solution, all timed in the same rounds; each two of them are a pair.

    Beside it the latency by replaying a graph of the same call, in one process that nobody freezes.
    """
    import torch

    from justgoal.evaluation import improvement
    from justgoal.evaluation.clock import undisturbed
    from justgoal.evaluation.devices.cuda import CudaHardware
    from justgoal.evaluation.evaluator import threads
    from justgoal.evaluation.memory import Field, sealed
    from justgoal.evaluation.workers import IMPORT_LIMIT, Workers

    def body(runtime: socket.socket) -> None:
        hardware = CudaHardware()
        awake = Workers(runtime, [], [], threads()).keep_awake()
        print(f"{'operator':<26} {'latency':>10} {'by a graph':>11} {'pairs':>6} {'differ, median':>15} {'90 %':>8} "
              f"{'worst':>8} {'hidden':>9}")  # fmt: skip
        for name, (dtype, shape, expression) in OPERATORS.items():
            fields = [Field("x", dtype, shape)]
            workers = Workers(runtime, fields, fields, threads(), hardware.worker)
            source = f"import torch\n\n\ndef run(x):\n    return {expression}\n"
            started = workers.start([sealed(tar(source.encode())) for _ in range(count)])
            blank = hardware.blank(workers, sealed(tar(CUDA_BLANK)))
            for worker in (*started, blank):
                worker.imported(IMPORT_LIMIT)
            data = [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(5)]
            readings = []
            awake.thaw()
            for number in range(12 + ROUNDS):
                with undisturbed():
                    if number == 12:
                        hardware.warm_up(blank)
                        readings.clear()
                    row = []
                    for worker in started:
                        worker.inputs.write([data[number % 5]])
                        worker.outputs.poison()
                        hardware.flush()
                        row.append(hardware.read(worker, worker.call(IMPORT_LIMIT)))
                    started[0].inputs.write([data[number % 5]])
                    hardware.flush()
                    readings.append([*row, hardware.cost(blank, row[0].seconds)])
            awake.freeze()
            *parties, costs = zip(*readings, strict=True)
            rows = [[reading.seconds - costs[0].seconds for reading in party] for party in parties]
            beyond = statistics.median(c.window - c.seconds for c in costs)
            hidden = [_median([r.window - r.seconds - beyond for r in party]) for party in parties]
            sizes = sorted(abs(improvement.ratio(one, other) - 1) for one, other in combinations(rows, 2))
            latency = _median([statistics.median(row) for row in rows])
            print(f"{name:<26} {latency:>7.1f} us {_replayed(expression, data, hardware):>8.1f} us {len(sizes):>6} "
                  f"{100 * statistics.median(sizes):>13.2f} % {100 * sizes[int(0.9 * len(sizes))]:>6.2f} % "
                  f"{100 * sizes[-1]:>6.2f} % {min(hidden):>+4.0f}..{max(hidden):<+4.0f}", flush=True)  # fmt: skip
            for worker in (*started, blank):
                worker.close()

    with_judge(body, gpus.first())


def _replayed(expression: str, data, hardware) -> float:  # type: ignore[no-untyped-def]
    """Microseconds of a call and the copy of what it returns, as a graph behind a delay on the device."""
    import torch

    run = eval(f"lambda x: {expression}", {"torch": torch})
    x, target = data[0].clone(), torch.empty_like(data[0])
    target.copy_(run(x))
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        target.copy_(run(x))
    for number in range(2 * ROUNDS):
        for work in (graph.replay, lambda: None):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            hardware.flush()
            hardware.worker.block.cuda.spin(0.0005)
            x.copy_(data[number % 5])
            begun.record()
            work()
            ended.record()
            torch.cuda.synchronize()
            times.append(begun.elapsed_time(ended) * 1e-3)
    return _median(times[::2]) - _median(times[1::2])


def _median(seconds: Sequence[float]) -> float:
    """In microseconds."""
    return statistics.median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clock", "null"))
    parser.add_argument("-n", type=int, default=12, help="fresh processes per operator")
    given = parser.parse_args()
    os.environ.update(compute_environment())
    if given.what == "clock":
        clock()
    else:
        null(given.n)


if __name__ == "__main__":
    main()
