"""Keeps the cores that solutions run on from going to sleep while windows are open. Standard library only.

A core that has nothing to do stops, and in a virtual machine is taken away; waking it takes 50 to 200 us, which varies.
So one loop runs on every core but the judge's, in a control group that the scheduler treats as idle: whatever else
wants the core has it at once, with few exceptions. On the judge's core they were many: every fourth call of two threads
waited for a tick there, 4 ms (measured).
"""

import os
import signal


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[1:]
    if not cores:
        signal.pause()
    for core in cores[1:]:
        if os.fork() == 0:
            cores = [core]
            break
    os.sched_setaffinity(0, {cores[0]})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


if __name__ == "__main__":
    main()
