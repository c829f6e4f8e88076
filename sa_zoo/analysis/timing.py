"""Seconds, bytes and the fastest product of a machine: how a run is measured beside others.

Absolute times drift from hour to hour; what is to be compared is therefore run in turns.
"""

import itertools
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]


def in_turns(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each run in each round; a first round warms up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Run, device: torch.device) -> int:
    """The most memory that a run holds at a time beyond what was held before it.

    On a CPU in a thread of its own, so that what earlier runs keep for the next one of their thread is counted.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU]):
        pass  # its first use has to be in the main thread
    with ThreadPoolExecutor(max_workers=1) as alone:
        return alone.submit(_peak_of_thread, run).result()


def _peak_of_thread(run: Run) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    # The profiler's tables only sum allocations up; the peak is in their order.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def products(dtype: torch.dtype, device: torch.device) -> tuple[float, list[Run]]:
    """GMACs of a square matrix product that keeps the device busy, and the ways it is done: one is the fastest there.

    torch's own product, and a 1x1 convolution.
    """
    size = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    image, kernel = a.view(16, 1, -1, size).permute(0, 3, 1, 2), b[:, :, None, None]
    return size**3 / 1e9, [partial(linear, a, b), partial(torch.conv2d, image, kernel)]


def device_named(name: str) -> torch.device:
    """A device whose clock and memory can be read; ValueError for any other one, or one that is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device: got {name!r}, expected one that is at hand: {reason}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, expected cpu or cuda, which can be measured")
    return device


def check_compiler(device: torch.device) -> None:
    """ValueError where torch.compile finds no compiler that builds for a device."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--compile: expected a compiler that torch.compile can use, got: {reason}") from error


def conditions(device: torch.device, rounds: int) -> dict[str, object]:
    """What a figure has to be read with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()
