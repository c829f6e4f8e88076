"""python scripts/reproduce.py RUNS --data DATA --title CIFAR-10 [--only 'resnet_tiny_cifar*']

Trains the rows of results/runs.toml, in order: one run folder per row and seed, NAME-SEED, in RUNS. With --gpu, the
rows that need a GPU instead of those for a CPU. Stop it at any time (Ctrl-C, SIGTERM or power failure) and run it
again: finished runs stay as they are, others resume. DATA is a folder or a Hub data set; results/runs.toml says what
rows of photographs need. Each run has one thread unless OMP_NUM_THREADS is set, and its log in RUNS/logs.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from runs import ALLOCATOR, ROOT, read_runs

# One thread per run. Narrow heads of vision transformers are slow in fused attention on a CPU.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TIMM_FUSED_ATTN": "0"} | ALLOCATOR


class Job(NamedTuple):
    arguments: list[str]
    after: str


def finished(run: Path) -> bool:
    """A run's card is written last."""
    return (run / "README.md").is_file() and (run / "metrics.json").is_file()


def jobs_left(runs: Path, only: str, gpu: bool, data: str, title: str) -> dict[str, Job]:
    """What is not finished, by name of the run."""
    jobs = {}
    for row in read_runs():
        if row.gpu != gpu or not fnmatch(row.name, only):
            continue
        for seed in range(row.seeds):
            if not finished(runs / f"{row.name}-{seed}"):
                jobs[f"{row.name}-{seed}"] = Job(
                    row.arguments(seed, data, title), row.after.replace("SEED", str(seed))
                )
    return jobs


def start(arguments: list[str], runs: Path, name: str, lock: int) -> subprocess.Popen[bytes]:
    if (runs / name / "train.toml").is_file():
        arguments = [*arguments, "--resume"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (runs / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sa_zoo", *arguments],
            cwd=runs,
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": paths},
            stdout=log,
            stderr=log,
            pass_fds=[lock],  # held by every run, also if this script is killed
            process_group=0,  # so that Ctrl-C reaches this script alone
        )


def work(waiting: dict[str, Job], runs: Path, beside: int, lock: int) -> list[str]:
    """Run everything that waits, `beside` at a time; returns the names of the runs that failed or could not start."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    try:
        while running or waiting:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                del running[name]
                outcome = "finished" if finished(runs / name) else "failed"
                if outcome == "failed":
                    failed.append(name)
                print(time.strftime("%H:%M:%S"), outcome, name, flush=True)
            ready = [n for n, job in waiting.items() if not job.after or finished(runs / job.after)]
            if not (ready or running):
                return [*failed, *waiting]
            for name in ready[: beside - len(running)]:
                print(time.strftime("%H:%M:%S"), "started", name, flush=True)
                running[name] = start(waiting.pop(name).arguments, runs, name, lock)
            time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()  # it saves a checkpoint
        for process in running.values():
            process.wait()
    return failed


def name_of_data(data: str, runs: Path) -> str:
    """What runs call the data: the same on every machine, by a link if it is a folder."""
    if not Path(data).is_dir():
        return data
    link = runs / "data" / "cifar10"
    if not link.is_symlink():
        link.symlink_to(Path(data).resolve())
    elif link.resolve() != Path(data).resolve():
        sys.exit(f"--data: got {data}, expected {link.resolve()}, as the runs in {runs} have")
    return "data/cifar10"


def main(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs.")],
    data: Annotated[str, typer.Option(help="Folder or Hub data set.")] = "uoft-cs/cifar10",
    title: Annotated[str, typer.Option(help="What results call the data.")] = "",
    only: Annotated[str, typer.Option(help="Names of the rows to train, with * and ?.")] = "*",
    gpu: Annotated[bool, typer.Option("--gpu", help="Train the rows for GPUs.")] = False,
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = 2,
) -> None:
    for folder in ("logs", "data"):
        (runs / folder).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (runs / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = name_of_data(data, runs)
            left = jobs_left(runs, only, gpu, name, title)
            failed = work(left, runs, jobs, lock.fileno())
        except BlockingIOError:
            sys.exit(f"got {runs}, in which runs are still going on; wait for them, or stop them")
        except KeyboardInterrupt:
            sys.exit("stopped; the same command continues")
    if failed:
        sys.exit(f"failed, see their logs in {runs / 'logs'}: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
