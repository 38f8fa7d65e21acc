"""The worker protocol on a CUDA device: the device's time, how far the judge's clock bears it out, and null pairs.

    python benchmarks/cuda_protocol.py clock           no-op and spinning solutions (1 minute)
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
MEGABYTES = (1, 16, 256)
OPERATORS = {
    "rms_norm 512x8192 bf16": ("bfloat16", (512, 8192), "torch.nn.functional.rms_norm(x, (8192,))"),
    "rms_norm 8192x8192 bf16": ("bfloat16", (8192, 8192), "torch.nn.functional.rms_norm(x, (8192,))"),
    "mm 2048 bf16": ("bfloat16", (2048, 2048), "x @ x"),
    "softmax 1024x4096 fp32": ("float32", (1024, 4096), "x.softmax(1)"),
}


def clock() -> None:
    """For several sizes of input: a blank's window, what spinning solutions are measured as, and what is hidden."""
    import torch

    from justgoal.evaluation.devices import Reading
    from justgoal.evaluation.devices.cuda import CudaHardware
    from justgoal.evaluation.evaluator import threads
    from justgoal.evaluation.memory import Field, sealed
    from justgoal.evaluation.workers import IMPORT_LIMIT, Worker, Workers

    def body(runtime: socket.socket) -> None:
        hardware = CudaHardware()
        for megabytes in MEGABYTES:
            fields = [Field("x", "float32", (megabytes << 18,))]
            workers = Workers(runtime, fields, fields, threads(), hardware.worker)
            data = torch.randn(megabytes << 18, device="cuda")
            sources = [CUDA_BLANK, *(CUDA_SPIN.format(seconds=seconds).encode() for seconds in SPINS)]
            blank, *_ = started = workers.start([sealed(tar(source)) for source in sources])
            for worker in started:
                worker.imported(IMPORT_LIMIT)

            def call(worker: Worker, data: torch.Tensor = data) -> Reading:
                worker.inputs.write([data])
                worker.outputs.poison()
                hardware.flush()
                return hardware.read(worker, worker.call(IMPORT_LIMIT))

            for worker in started:
                call(worker)
            hardware.warm_up(blank)
            print(f"\ninput and output of {megabytes} MB, medians of {ROUNDS} calls, repeated {BLOCKS} times (us)")
            print(f"{'spins':>8} {'window':>9} {'range':>7} {'claimed':>10} {'range':>7} {'error':>7} {'hidden':>8} "
                  f"{'lowest':>8} {'highest':>8}")  # fmt: skip
            blocks = [[[call(worker) for worker in started] for _ in range(ROUNDS)] for _ in range(BLOCKS)]
            for index, seconds in enumerate((0.0, *SPINS)):
                windows, claims, hidden = list[float](), list[float](), list[float]()  # microseconds
                for rounds in blocks:
                    windows.append(_median([row[index].window for row in rounds]))
                    claims.append(_median([row[index].seconds - row[0].seconds * (index > 0) for row in rounds]))
                    hidden.append(windows[-1] - _median([row[0].window for row in rounds]) - claims[-1])
                window, claimed, rest = map(statistics.median, (windows, claims, hidden))
                print(f"{seconds * 1e6:>8.0f} {window:>9.1f} {max(windows) - min(windows):>7.1f} {claimed:>10.2f} "
                      f"{max(claims) - min(claims):>7.2f} {claimed - seconds * 1e6:>+7.2f} {rest:>+8.1f} "
                      f"{min(hidden):>+8.1f} {max(hidden):>+8.1f}", flush=True)  # fmt: skip
            for worker in started:
                worker.close()

    with_judge(body, gpus.first())


def null(count: int) -> None:
    """`count` fresh processes of the same solution, all timed in the same rounds; each two of them are a pair."""
    import torch

    from justgoal.evaluation import improvement
    from justgoal.evaluation.devices.cuda import CudaHardware
    from justgoal.evaluation.evaluator import threads
    from justgoal.evaluation.memory import Field, sealed
    from justgoal.evaluation.workers import IMPORT_LIMIT, Workers

    def body(runtime: socket.socket) -> None:
        hardware = CudaHardware()
        print(f"{'operator':<26} {'latency':>10} {'pairs':>6} {'differ, median':>15} {'90 %':>8} {'worst':>8}")
        for name, (dtype, shape, expression) in OPERATORS.items():
            fields = [Field("x", dtype, shape)]
            workers = Workers(runtime, fields, fields, threads(), hardware.worker)
            source = f"import torch\n\n\ndef run(x):\n    return {expression}\n"
            started = workers.start([sealed(tar(source.encode())) for _ in range(count)])
            blank = hardware.blank(workers, sealed(tar(CUDA_BLANK)))
            for worker in (*started, blank):
                worker.imported(IMPORT_LIMIT)
            data = [torch.randn(shape, dtype=getattr(torch, dtype), device="cuda") for _ in range(5)]
            for number in range(12 + ROUNDS):
                for worker in (*started, blank):
                    worker.inputs.write([data[number % 5]])
                    worker.outputs.poison()
                    hardware.flush()
                    reading = hardware.read(worker, worker.call(IMPORT_LIMIT))
                    times.setdefault(worker, []).append(reading.seconds) if number >= 12 else times.pop(worker, None)
            cost = statistics.median(times.pop(blank))
            rows = [[seconds - cost for seconds in times.pop(worker)] for worker in started]
            sizes = sorted(abs(improvement.ratio(one, other) - 1) for one, other in combinations(rows, 2))
            latency = statistics.median(map(statistics.median, rows)) * 1e6
            print(f"{name:<26} {latency:>7.1f} us {len(sizes):>6} {100 * statistics.median(sizes):>13.2f} % "
                  f"{100 * sizes[int(0.9 * len(sizes))]:>6.2f} % {100 * sizes[-1]:>6.2f} %", flush=True)  # fmt: skip
            for worker in (*started, blank):
                worker.close()

    times: dict[object, list[float]] = {}
    with_judge(body, gpus.first())


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
