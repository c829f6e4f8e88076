"""python scripts/gpu_day.py --out DIR --minutes 40 --data DATA [--title TEXT]

Does everything that a GPU is needed for, within so many minutes: checks all models, measures speed and memory, trains
the large networks, and writes DIR/report.md and cards. Stop it at any moment and run it again: it continues where it
was. docs/gpu_day.md says what it writes, and how to prepare a machine without a network connection.

Without a GPU this is a rehearsal: small networks, few images, the same steps.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from gpu_measure import benchmark, check, profiled, thresholds
from gpu_plan import REHEARSAL, SCALE, Day, Record
from gpu_report import report
from gpu_train import rates, train_model
from timm.models import is_model

from sa_zoo.folders.metrics import environment
from sa_zoo.folders.write import read_json, write_json
from sa_zoo.training.progress import Interrupted

TICK = 2.0  # seconds between two records of the time


class Step(NamedTuple):
    """A step, and its share of the time: minutes of forty."""

    name: str
    share: float
    run: Callable[[Day, Record], None]


def steps_of(day: Day) -> list[Step]:
    """All steps, in order. `train_model` takes what its model is from the name of its step."""
    trained = [
        Step(f"train-{name}", share, train_model)
        for name, share in day.scale.trained.items()
        if is_model(name)
    ]
    return [
        Step("check", 2, check),
        Step("benchmark", 7, benchmark),
        Step("thresholds", 1, thresholds),
        Step("profile", 0.5, profiled),
        Step("rates", 3, rates),
        *trained,
        Step("report", 2, report),
    ]


class Clock:
    """How long this command has run by `now`, over all calls; the time between two calls does not count."""

    def __init__(
        self, path: Path, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self.seconds = seconds
        self.now = now
        self.before = read_json(path)["seconds"] if path.is_file() else 0.0
        self.start = now()

    def used(self) -> float:
        return self.before + self.now() - self.start

    def left(self) -> float:
        return self.seconds - self.used()

    def record(self) -> None:
        """Write the time down, again and again: a killed process loses the time since the last record only."""
        while True:
            write_json(self.path, {"seconds": self.used()})
            time.sleep(TICK)


def run_steps(day: Day, steps: Iterable[Step], clock: Clock) -> bool:
    """Run all steps that are not finished, each within its share of the time left; returns False after one that failed.

    A failed step counts as finished: what is left of the device may not run another in this process.
    """
    waiting = [step for step in steps if not Record(day.out, step.name).finished]
    while waiting:
        step = waiting[0]
        part = step.share / sum(each.share for each in waiting)
        end = clock.used() + max(clock.left(), 0.0) * part
        record = Record(day.out, step.name, left=lambda end=end: end - clock.used())
        print(f"{clock.used() / 60:.1f} min: {step.name}, {record.left() / 60:.1f} min", flush=True)
        try:
            step.run(day, record)
        except (Interrupted, KeyboardInterrupt):
            raise
        except Exception as error:
            traceback.print_exc()
            record.add(error=f"{type(error).__name__}: {error}", finished=True)
            return False
        record.add(finished=True)
        waiting.pop(0)
    return True


def run_day(day: Day, clock: Clock) -> bool:
    """Run or continue a day; returns False if a step failed, after which others need a new process."""
    for left_behind in day.out.glob(".*.incomplete"):
        if left_behind.is_file():
            left_behind.unlink()
    rehearsal = {"rehearsal": day.device.type == "cpu"}
    write_json(day.out / "conditions.json", rehearsal | environment(day.device))
    threading.Thread(target=clock.record, daemon=True).start()
    return run_steps(day, steps_of(day), clock)


def main(
    out: Annotated[Path, typer.Option(help="Folder of everything that the day brings.")],
    data: Annotated[str, typer.Option(help="CIFAR-10: folder or Hub data set.")],
    minutes: Annotated[float, typer.Option(help="For all steps, over all calls.", min=0.1)] = 40,
    title: Annotated[str, typer.Option(help="What results call the data.")] = "",
) -> None:
    if torch.cuda.is_available():
        day = Day(out, data, title, torch.device("cuda"), SCALE)
    else:
        print("no GPU: a rehearsal with small networks and few images", flush=True)
        day = Day(out, data, title, torch.device("cpu"), REHEARSAL)
    out.mkdir(parents=True, exist_ok=True)
    try:
        complete = run_day(day, Clock(out / "clock.json", 60 * minutes))
    except (Interrupted, KeyboardInterrupt) as stopped:
        sys.exit(f"{str(stopped) or 'stopped'}; the same command continues")
    if not complete:  # in a new process: an error may have left the device unusable for this one
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print(out / "report.md")


if __name__ == "__main__":
    typer.run(main)
