"""The benchmark: cases of subjects that take turns, each relative to the yardstick of its case, as table and as JSON.

A ratio is the median over the rounds of the subject's ratio to the yardstick in the same round.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sa_zoo.analysis.timing import Run, conditions, in_turns, matrix_products, peak_bytes
from sa_zoo.kernels.choose import only
from sa_zoo.model_folder import write_json


@dataclass(frozen=True)
class Subject:
    """One way to do the work of a case.

    function: subjects of a case with the same one compute the same; counted: run to count the work of, if not `run`.
    """

    run: Run
    dtype: torch.dtype = torch.float32
    function: str = ""
    counted: Run | None = None


@dataclass(frozen=True)
class Case:
    """Subjects by name, built only when measured, and the name of the one that ratios are taken to."""

    model: str
    phase: str
    images: int
    yardstick: str
    subjects: Callable[[], dict[str, Subject]]
    tokens: int = 0  # of the single layer that is measured; 0: a whole network


@dataclass(frozen=True)
class Row:
    """One subject of a case.

    milliseconds: median per image. mib: peak memory beyond the weights, per image. gmacs: multiply-adds (1e9) executed
    per image; needed: the fewest of all subjects that compute the same function. ceiling: share of the machine's
    fastest matrix product that the needed ones reach in that time. speed, memory: relative to the yardstick.
    """

    model: str
    phase: str
    subject: str
    images: int
    tokens: int
    milliseconds: float
    mib: float
    gmacs: float
    needed: float
    ceiling: float
    speed: float
    memory: float


def step(
    network: nn.Module,
    x: Tensor,
    route: str | None = None,
    dtype: torch.dtype = torch.float32,
    compiled: Callable[[Tensor], Any] | None = None,
) -> Run:
    """Inference; forward and backward pass, under autocast to `dtype`, if the network is in training mode.

    All layers are evaluated by `route`, or as they choose if it is None. `compiled` is called in place of the network.
    """
    call = compiled or network

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
    times, ceilings = _times(subjects, rounds, device)
    peaks = {name: peak_bytes(subject.run, device) for name, subject in subjects.items()}
    work = {name: _gmacs(subject.counted or subject.run) / case.images for name, subject in subjects.items()}
    rows = []
    for name, subject in subjects.items():
        same = [other for other in subjects if subject.function and subjects[other].function == subject.function]
        needed = min(work[other] for other in [name, *same])
        seconds = statistics.median(times[name]) / case.images
        ratios = [other / own for other, own in zip(times[case.yardstick], times[name], strict=True)]
        rows.append(
            Row(
                model=case.model,
                phase=case.phase,
                subject=name,
                images=case.images,
                tokens=case.tokens,
                milliseconds=1e3 * seconds,
                mib=peaks[name] / case.images / 2**20,
                gmacs=work[name],
                needed=needed,
                ceiling=needed / seconds / ceilings[subject.dtype],
                speed=statistics.median(ratios),
                memory=peaks[name] / max(peaks[case.yardstick], 1),
            )
        )
    return rows


def _times(
    subjects: dict[str, Subject], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[torch.dtype, float]]:
    """Seconds of each subject in each round, and GMAC/s of the fastest matrix product, which takes turns with them."""
    products = {dtype: matrix_products(dtype, device) for dtype in {subject.dtype for subject in subjects.values()}}
    runs = {name: subject.run for name, subject in subjects.items()}
    for dtype, (_, ways) in products.items():
        runs |= {f"{dtype}, {number}": way for number, way in enumerate(ways)}
    times = in_turns(runs, rounds, device)
    ceilings = {
        dtype: work / min(min(times[f"{dtype}, {number}"]) for number in range(len(ways)))
        for dtype, (work, ways) in products.items()
    }
    return times, ceilings


def _gmacs(run: Run) -> float:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops() / 2e9


def table(rows: Iterable[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| model | phase | images | subject | ms per image | MiB per image | GMACs | needed | of the ceiling | speed "
        "| memory |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.model} | {row.phase} | {row.images} | {row.subject} | {row.milliseconds:.2f} | {row.mib:.1f} "
        f"| {row.gmacs:.2f} | {row.needed:.2f} | {row.ceiling:.0%} | {row.speed:.2f}x | {row.memory:.2f}x |"
        for row in rows
    ]
    return "\n".join(lines)


def run_cases(
    cases: Iterable[Case],
    rounds: int,
    device: torch.device,
    command: str,
    path: Path | None,
) -> None:
    """Measure cases, print their tables, and add this run to a JSON file, which is replaced after each case.

    Raises ValueError, before anything is measured, if the file holds something else.
    """
    found = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {"runs": []}
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise ValueError(f"--json: got {path}, which holds something else, expected a new file or one of this command")
    run: dict[str, Any] = {"command": command, "conditions": conditions(device, rounds), "rows": []}
    print(json.dumps(run["conditions"]))
    for case in cases:
        rows = measure(case, rounds, device)
        run["rows"] += [asdict(row) for row in rows]
        print(table(rows) + "\n", flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found | {"runs": [*found["runs"], run]})
