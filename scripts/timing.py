"""How the benchmark measures: subjects that take turns, their memory and their work, as a table and as JSON.

Absolute times drift from hour to hour, so what is to be compared takes turns. A ratio is the median over the rounds of
a subject's ratio to the yardstick of its case in the same round.
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from sa_zoo.fast.route import only
from sa_zoo.folders.write import write_json
from sa_zoo.training.environment import environment

Run = Callable[[], object]
Row = dict[str, Any]
# Keys of a row that are numbers: head of the column, and format.
COLUMNS = {
    "images": ("images", "{}"),
    "milliseconds": ("ms per image", "{:.3g}"),  # median over the rounds
    "mib": ("MiB per image", "{:.1f}"),  # peak beyond the weights
    "gmacs": ("GMACs", "{:.2f}"),  # multiply-adds (1e9) per image
    "speed": ("speed", "{:.3g}x"),  # relative to the yardstick
    "memory": ("memory", "{:.3g}x"),
}


@dataclass(frozen=True)
class Subject:
    """One way to do the work of a case."""

    run: Run
    counted: Run | None = None  # what to count the work of, if not `run`


@dataclass(frozen=True)
class Case:
    """Subjects by name, built only when measured, and the name of the one that ratios are taken to."""

    model: str
    phase: str
    images: int
    yardstick: str
    subjects: Callable[[], dict[str, Subject]]


def step(
    network: nn.Module,
    x: Tensor,
    route: str = "",
    dtype: torch.dtype = torch.float32,
    compiled: Any = None,
) -> Run:
    """Inference; forward and backward pass, under autocast to `dtype`, if the network is in training mode.

    All layers are evaluated by `route`, or as they choose if it is empty. `compiled` is called in place of the network.
    """
    call = network if compiled is None else compiled

    def infer() -> None:
        with torch.inference_mode(), only(route) if route else nullcontext():
            call(x)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        x.grad = None
        with only(route) if route else nullcontext():
            with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
                output = call(x)
            output.backward(torch.ones_like(output))

    return train if network.training else infer


def in_turns(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each run in each round; a first round warms up and is not counted."""
    synchronize: Run = torch.cpu.synchronize
    if device.type == "cuda":
        synchronize = partial(torch.cuda.synchronize, device)
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
    found = profiled.profiler.kineto_results.events()
    events = [event for event in found if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def measure(case: Case, rounds: int, device: torch.device) -> list[Row]:
    """Rows of all subjects of a case, after one round that is not counted."""
    subjects = case.subjects()
    runs = {name: subject.run for name, subject in subjects.items()}
    times = in_turns(runs, rounds * max(1, 50 // case.images), device)
    peaks = {name: peak_bytes(subject.run, device) for name, subject in subjects.items()}
    work = {}
    for name, subject in subjects.items():
        work[name] = _gmacs(subject.counted or subject.run) / case.images
    rows = []
    for name in subjects:
        seconds = statistics.median(times[name]) / case.images
        pairs = zip(times[case.yardstick], times[name], strict=True)
        rows.append(
            {
                "model": case.model,
                "phase": case.phase,
                "subject": name,
                "yardstick": case.yardstick,
                "images": case.images,
                "milliseconds": 1e3 * seconds,
                "mib": peaks[name] / case.images / 2**20,
                "gmacs": work[name],
                "speed": statistics.median(other / own for other, own in pairs),
                "memory": peaks[name] / max(peaks[case.yardstick], 1),
            }
        )
    return rows


def _gmacs(run: Run) -> float:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops() / 2e9


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [["model", "phase", "subject", *(head for head, _ in COLUMNS.values())]]
    lines.append(["---"] * 3 + ["--:"] * len(COLUMNS))
    for row in rows:
        numbers = [cell(row, key) for key in COLUMNS]
        lines.append([row["model"], row["phase"], row["subject"], *numbers])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: Row, key: str) -> str:
    """A number of a row as text."""
    return COLUMNS[key][1].format(row[key])


def run_cases(
    cases: Iterable[Case], rounds: int, device: torch.device, command: str, path: Path | None
) -> None:
    """Measure cases, print tables, and add this run to a JSON file. Raises ValueError if it holds something else."""
    found: Any = {"runs": []}
    if path and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise ValueError(f"--json: got {path}, expected a new file or one of this command")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    load = round(os.getloadavg()[0], 2)
    conditions = {"started": started, "load": load, "rounds": rounds, **environment(device)}
    run: dict[str, Any] = {"command": command, "conditions": conditions, "rows": []}
    print(json.dumps(conditions))
    for case in cases:
        rows = measure(case, rounds, device)
        run["rows"] += rows
        print(table(rows) + "\n", flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found | {"runs": [*found["runs"], run]})
