"""python tests/killed_day.py OUT SEED

Runs a small day of scripts/gpu_day.py in one child process after the other. Ten die at random moments; the last one
runs to its end. Writes OUT/states.json: what was finished and planned at the end of each.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from tiny_runs import noise_images, parquet_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
import gpu_measure
from gpu_day import Clock, run_day
from gpu_plan import REHEARSAL, Day, Record

KILLS = 10
SECONDS = 60  # of computing time, for all steps
SCALE = replace(
    REHEARSAL,
    trained={"sa_quadratic_tiny_cifar": 8},
    checked="sa_quadratic_tiny_cifar",
    batch=8,
    sides=(5, 7),
    images=(20, 7),
)


def small_products(
    dtype: torch.dtype, device: torch.device
) -> tuple[float, list[Callable[[], object]]]:
    """As `matrix_products`, which takes most of the time of a day as small as this one."""
    a, b = torch.randn(2, 64, 64, dtype=dtype)
    return 64**3 / 1e9, [lambda: a @ b, lambda: b @ a]


def run(out: Path, data: Path, dies_after: float = 0.0) -> int:
    """Start the day in a child process, which has what is imported here; returns what waitpid says of its end.

    The child dies after so many seconds of computing time, by a signal that it does not handle. Its clock is of that
    time, too, so that nothing depends on how busy the machine is.
    """
    child = os.fork()
    if not child:
        code = 1
        signal.setitimer(signal.ITIMER_PROF, dies_after)
        with suppress(BaseException):
            day = Day(out, str(data), "noise", torch.device("cpu"), SCALE)
            code = 0 if run_day(day, Clock(out / "clock.json", SECONDS, time.process_time)) else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state_of(out: Path) -> dict[str, object]:
    """The finished steps, and the plan of the training run, if there is one."""
    names = [path.stem for path in sorted(out.glob("*.json"))]
    finished = [name for name in names if Record(out, name).finished]
    plan = Record(out, "train-sa_quadratic_tiny_cifar").found.get("epochs")
    return {"finished": finished, "epochs": plan}


def main(out: Path, seed: int) -> None:
    images = {"train": noise_images(23, (32, 32)), "test": noise_images(11, (32, 32))}
    (out / "day").mkdir(parents=True)
    data = parquet_folder(out / "noise", images)
    benchmark.matrix_products = gpu_measure.matrix_products = small_products
    gpu_measure.suites.models = lambda *arguments: iter(())  # layers are measured in the same way
    chance = random.Random(seed)
    states = []
    for dies_after in [*(chance.uniform(0.2, 1.5) for _ in range(KILLS)), 0.0]:
        code = run(out / "day", data, dies_after)
        states.append({"code": code} | state_of(out / "day"))
    (out / "states.json").write_text(json.dumps(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
