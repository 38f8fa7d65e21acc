"""A trusted solution that does nothing for as many seconds as its input says, and says for how many it did.

What its window takes beyond that is the window's own cost. It reaches its input and output without torch, whose first
operation after a pause takes 10 to 60 us.
"""

import ctypes
import time
from typing import Any

CELLS: list[ctypes.c_double] = []


def run(seconds: Any, out: Any) -> Any:
    if not CELLS:
        CELLS.extend(ctypes.c_double.from_address(tensor.data_ptr()) for tensor in (seconds, *out))
    asked, spent = CELLS
    begun = time.perf_counter()
    end = begun + asked.value
    while (now := time.perf_counter()) < end:
        pass
    spent.value = now - begun
    return out
