"""Peak memory of training steps: live tensor storage, not the process's resident set."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile


@contextmanager
def _quiet() -> Iterator[None]:
    # The profiler's native code writes its own log lines to file descriptor 2.
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def peak_bytes(work: Callable[[], object]) -> int:
    """The largest sum of live storage that ``work`` allocates on the CPU, everything it builds included."""
    with (
        _quiet(),
        warnings.catch_warnings(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        warnings.simplefilter("ignore")  # what there is to warn of, the run itself says
        keep = work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    del keep
    return peak
