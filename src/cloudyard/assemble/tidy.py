"""Memory given back by a daemon after a busy time. Knows Python's allocator and the C library's, nothing of
yards.
"""

from __future__ import annotations

import ctypes
import gc
import time

import anyio

THRESHOLDS = (50_000, 10, 10)  # objects of the youngest generation, then collections of the one below
LOOK_S = 5.0
WORK_S = 0.2  # of processor time: some 40 sandboxes made and stopped


def collect_less() -> None:
    """Look for garbage less often, and never among what was loaded at the start.

    A server holds tens of thousands of objects for as long as their sandboxes live. With the default
    thresholds the collector walked all of them several times a second: with 1,000 sandboxes, a tenth of the
    time of a create. What it finds so late is `give_back`'s to find sooner.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


async def give_back() -> None:
    """Collect garbage after every so much work, until cancelled.

    A sandbox's objects know each other, so that only the collector frees them; aged, and with thresholds so
    high, they would stay for hours. A collection takes some 10 ms with 1,000 sandboxes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    worked_s = time.process_time()
    while True:
        await anyio.sleep(LOOK_S)
        if time.process_time() - worked_s > WORK_S:
            gc.collect()
            if trim is not None:
                trim(0)
            worked_s = time.process_time()
