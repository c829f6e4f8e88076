"""The steps of gpu_day.py that measure: all models against the CPU, speed and memory, thresholds, a profile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import suites
import timm
import torch
from benchmark import Case, measure, run_cases
from gpu_plan import Day, Record
from timing import in_turns, matrix_products
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sa_zoo.folders.write import read_json, write_file

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest relative difference of logits, and of all gradients, from float32 on a CPU
LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.3)}
IMAGES = 8  # that models are checked with


def check(day: Day, record: Record) -> None:
    """Compare all models on the device with the CPU, forward and backward."""
    models = record.found.get("models", {})
    for name in timm.list_models(day.scale.checked):
        if name not in models and record.left() > 0:
            models[name] = compared(name, day.device)
            record.add(models=models)


def compared(name: str, device: torch.device) -> dict[str, Any]:
    """Relative differences of logits and gradients, by type, and whether they are within LIMITS."""
    torch.manual_seed(0)
    network = timm.create_model(name).train()
    x = torch.randn(IMAGES, 3, 32, 32)
    expected = outputs(network, x, torch.float32)
    network.to(device)
    found = {}
    for precision, dtype in TYPES.items():
        got = outputs(network, x.to(device), dtype)
        differences = [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]
        within = all(map(float.__le__, differences, LIMITS[precision]))
        found[precision] = {"differences": differences, "within": within}
    return found


def outputs(network: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and all gradients, in float32 without TF32, or under autocast to another type."""
    network.zero_grad()
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32),
    ):
        logits = network(x).float()
        logits.square().mean().backward()
    gradients = [parameter.grad.flatten() for parameter in network.parameters()]
    return logits.detach().cpu(), torch.cat(gradients).cpu()


def measured_cases(day: Day) -> Iterator[tuple[str, Case]]:
    """The cases of the benchmark by name, the most important first: again without compiling, should that fail."""
    scale = day.scale
    names = [name for name in scale.trained if timm.is_model(name)]
    compiled = list(suites.models(names, scale.batch, day.device, scale.compiled))
    for phase in ("training, bfloat16", "inference, bfloat16"):
        for case in compiled:
            if case.phase == phase:
                yield f"{case.model}, {phase}, compiled", case
    ways = {"as built": "", "by axes": "by axes", "definition": "definition"}
    layers = suites.layers(scale.measured[0], scale.sides, day.device, ways)
    others = suites.models(scale.measured, scale.batch, day.device)
    for case in (*layers, *others):
        yield f"{case.model}, {case.phase}", case


def benchmark(day: Day, record: Record) -> None:
    """Measure each case that was not, and write OUT/speed.json, in the form of docs/benchmarks/*.json."""
    path = day.out / "speed.json"
    errors = record.found.get("errors", {})
    for name, case in measured_cases(day):
        done = {(row["model"], row["phase"]) for row in rows_of(path)}
        if (case.model, case.phase) in done or name in errors or record.left() < 0:
            continue
        try:
            run_cases([case], day.scale.rounds, day.device, "scripts/gpu_day.py", path)
        except RuntimeError as error:  # such as too little memory for one subject
            errors[name] = str(error).partition("\n")[0]
            record.add(errors=errors)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """All rows of a file of the benchmark, which need not be there."""
    runs = read_json(path)["runs"] if path.is_file() else []
    return [row for run in runs for row in run["rows"]]


def thresholds(day: Day, record: Record) -> None:
    """Measure one layer by axes and by its definition, with batches that fill the device.

    "above" is the largest number of pixels, of those measured, at which the definition was faster.
    """
    scale = day.scale
    ways = {"by axes": "by axes", "definition": "definition"}
    rows = record.found.get("rows", [])
    for phase in ("inference, bfloat16", "training, bfloat16"):
        cases = suites.layers(scale.measured[0], scale.sides, day.device, ways, phase, scale.pixels)
        done = {(row["model"], row["phase"]) for row in rows}
        for case in cases:
            if (case.model, phase) not in done and record.left() > 0:
                rows += measure(case, scale.rounds, day.device)
                record.add(rows=rows)
    above = dict.fromkeys((row["phase"] for row in rows), 0)
    for row in rows:
        if row["subject"] == "by axes" and row["speed"] < 1:
            side = int(re.findall(r"(\d+) tokens", row["model"])[0])
            above[row["phase"]] = max(above[row["phase"]], side**2)
    record.add(above=above)


def profiled(day: Day, record: Record) -> None:
    """Measure the fastest matrix products, and write OUT/profile.txt of the phase that is furthest from them."""
    ceilings = {}
    for precision, dtype in TYPES.items():
        gmacs, runs = matrix_products(dtype, day.device)
        times = in_turns({str(number): run for number, run in enumerate(runs)}, 5, day.device)
        ceilings[precision] = 2e-3 * gmacs / min(map(min, times.values()))
    record.add(tflops=ceilings)
    rows = [
        row
        for row in rows_of(day.out / "speed.json")
        if row["subject"] == "as built" and row["model"] in day.scale.measured
    ]
    if not rows:
        return
    slowest = min(rows, key=lambda row: row["ceiling"])
    (case,) = [
        case
        for case in suites.models([slowest["model"]], day.scale.batch, day.device)
        if case.phase == slowest["phase"]
    ]
    run = case.subjects()["as built"].run
    run()
    activities = [ProfilerActivity.CPU]
    order = "self_cpu_time_total"
    if day.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        order = "self_cuda_time_total"
    with profile(activities=activities, acc_events=True) as measurement:
        run()
    text = measurement.key_averages().table(sort_by=order, row_limit=30)
    write_file(day.out / "profile.txt", f"{case.model}, {case.phase}, as built\n{text}\n")
    record.add(model=case.model, phase=case.phase, ceiling=slowest["ceiling"])
