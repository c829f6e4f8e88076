"""How runs are measured. Absolute times drift from hour to hour, so runs that are to be compared take turns."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]


def in_turns(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each run in each round; a first round warms up and is not counted."""
    synchronize = (
        partial(torch.cuda.synchronize, device) if device.type == "cuda" else torch.cpu.synchronize
    )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def peak_bytes(run: Run, device: torch.device) -> int:
    """Largest number of bytes that a run holds at a time, beyond what was allocated before it.

    On a CPU the run gets a thread of its own, so that buffers which earlier runs keep for their thread are counted.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler logs each of its starts
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        pass  # its first use has to be in the main thread
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(_peak_of_thread, run).result()


def _peak_of_thread(run: Run) -> int:
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        run()
    # The profiler's tables only sum allocations; the peak follows from their order.
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def matrix_products(dtype: torch.dtype, device: torch.device) -> tuple[float, list[Run]]:
    """GMACs of a square matrix product that keeps the device busy, and two ways to compute it: one is the fastest."""
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    image, kernel = a.view(16, 1, -1, size).permute(0, 3, 1, 2), b[:, :, None, None]
    return size**3 / 1e9, [partial(linear, a, b), partial(torch.conv2d, image, kernel)]


def device_named(name: str, compile_mode: str) -> torch.device:
    """A device that can be measured, and that torch.compile compiles for if there is a mode; else ValueError."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device: got {name!r}, expected an available one: {str(error).splitlines()[0]}"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, expected cpu or cuda, which can be measured")
    try:
        if compile_mode:
            torch.compile(torch.neg, mode=compile_mode)(torch.ones(2, device=device))
    except RuntimeError as error:
        expected = f"a mode of torch.compile, and a compiler for it: {str(error).splitlines()[0]}"
        raise ValueError(f"--compile: got {compile_mode!r}, expected {expected}") from error
    return device
