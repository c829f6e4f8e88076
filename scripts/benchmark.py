"""The benchmark: cases of subjects that take turns, each relative to the yardstick of its case, as table and as JSON.

A ratio is the median over the rounds of the subject's ratio to the yardstick in the same round.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from timing import Run, in_turns, matrix_products, peak_bytes
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sa_zoo.folders.metrics import environment
from sa_zoo.folders.write import write_json
from sa_zoo.kernels.choose import only


@dataclass(frozen=True)
class Subject:
    """One way to do the work of a case."""

    run: Run
    dtype: torch.dtype = torch.float32
    function: str = ""  # subjects of a case with the same one compute the same
    counted: Run | None = None  # what to count the work of, if not `run`


@dataclass(frozen=True)
class Case:
    """Subjects by name, built only when measured, and the name of the one that ratios are taken to."""

    model: str
    phase: str
    images: int
    yardstick: str
    subjects: Callable[[], dict[str, Subject]]


# Keys of a row that are numbers: head of the column, and format.
COLUMNS = {
    "images": ("images", "{}"),
    "milliseconds": ("ms per image", "{:.2f}"),  # median over the rounds
    "mib": ("MiB per image", "{:.1f}"),  # peak beyond the weights
    "gmacs": ("GMACs", "{:.2f}"),  # multiply-adds (1e9) per image
    "needed": ("needed", "{:.2f}"),  # the fewest of all subjects that compute the same function
    "ceiling": ("of the ceiling", "{:.0%}"),  # share of the fastest matrix product that they reach
    "speed": ("speed", "{:.3g}x"),  # relative to the yardstick
    "memory": ("memory", "{:.3g}x"),
}
Row = dict[str, Any]


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


def measure(case: Case, rounds: int, device: torch.device) -> list[Row]:
    """Rows of all subjects of a case, after one round that is not counted."""
    subjects = case.subjects()
    runs = {name: subject.run for name, subject in subjects.items()}
    dtypes = {subject.dtype for subject in subjects.values()}
    products = {dtype: matrix_products(dtype, device) for dtype in dtypes}
    for dtype, (_, both) in products.items():
        runs |= {f"{dtype} {number}": run for number, run in enumerate(both)}
    times = in_turns(runs, rounds, device)
    # GMAC/s of the fastest matrix product, which takes turns with the subjects
    ceilings = {
        dtype: gmacs / min(times[f"{dtype} 0"] + times[f"{dtype} 1"])
        for dtype, (gmacs, _) in products.items()
    }
    peaks = {name: peak_bytes(subject.run, device) for name, subject in subjects.items()}
    work = {
        name: _gmacs(subject.counted or subject.run) / case.images
        for name, subject in subjects.items()
    }
    rows = []
    for name, subject in subjects.items():
        same = [
            work[other]
            for other in subjects
            if subject.function and subjects[other].function == subject.function
        ]
        needed = min([work[name], *same])
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
                "needed": needed,
                "ceiling": needed / seconds / ceilings[subject.dtype],
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
    """Rows as a Markdown table, with the columns that they have values for."""
    present = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = [
        ["model", "phase", "subject", *(COLUMNS[key][0] for key in present)],
        ["---"] * 3 + ["--:"] * len(present),
    ]
    lines += [
        [row["model"], row["phase"], row["subject"], *(cell(row, key) for key in present)]
        for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: Row, key: str) -> str:
    """A number of a row as text; empty if it was not measured."""
    return "" if row.get(key) is None else COLUMNS[key][1].format(row[key])


def run_cases(
    cases: Iterable[Case], rounds: int, device: torch.device, command: str, path: Path | None
) -> None:
    """Measure cases, print tables, and add this run to a JSON file. Raises ValueError if it holds something else."""
    found = (
        json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {"runs": []}
    )
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise ValueError(
            f"--json: got {path}, which holds something else, expected a new file or one of this command"
        )
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
