"""Runs in processes of their own, killed by a signal at a chosen moment, resumed, and compared bit for bit.

Processes are forked from a server that has imported everything and computed nothing: a fresh process costs
milliseconds. `python -m sa_zoo` runs in each, with its arguments and exit code.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tiny_runs import MUON, free_port

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    [
        "accelerate",
        "sa_zoo.commands.train",
        "sa_zoo.cli",
        "sa_zoo.publishing.card",
        "timm.optim",
        "transformers",
        "killed_runs",
    ]
)
# Everything that draws random numbers or keeps a state of its own; sections for tiny_config. A run takes a second.
EVERYTHING: dict[str, dict[str, Any]] = {
    "model": {
        "name": "sa_quadratic_tiny_cifar",
        "args": {**MUON["model"]["args"], "drop_rate": 0.1},
    },
    "data": {"image_size": 6},  # not the network's own
    "augment": {
        "crop_padding": 1,
        "flip": True,
        "mixup": 0.3,
        "label_smoothing": 0.1,
    },
    "optim": {"name": "adamw", "clip": 1.0},
    "train": {"epochs": 2, "batch_size": 400, "checkpoint_steps": 1},
}


def beside(out: Path, suffix: str) -> Path:
    """A file of ours next to a run folder; if that has a disk of its own, which may be full, outside of it."""
    return (out.parent.parent if out.parent.is_mount() else out.parent) / f"{out.name}{suffix}"


def _watch(out: Path, kill: tuple[int, int] | None, log: Path) -> None:
    """Count changes of files in and next to `out`, a line in `log` each; kill (signal, number of the change)."""
    count = 0
    folders = {out.name, f".{out.name}.incomplete"}
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writing = event == "open" and arguments[0] and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writing or event in WRITES) or not str(arguments[0]).startswith(f"{out.parent}/"):
            return
        changed = Path(str(arguments[0])).relative_to(out.parent)
        if changed.parts[0] in folders:
            os.write(descriptor, f"{event} {changed}\n".encode())
            count += 1
            if kill and count == kill[1]:
                os.kill(os.getpid(), kill[0])

    sys.addaudithook(audit)


def _keep_state(out: Path) -> None:
    """Copy the last checkpoint of a finished run before it is removed: it has the optimizer."""
    from sa_zoo.training import train

    remove = train.remove_checkpoints

    def keep(folder: Path) -> None:
        newest = max((folder / "checkpoints").glob("epoch-*"), default=None)
        kept = beside(out, "-state")
        # a run killed while it removes them may leave the older one only
        if newest and not kept.exists():
            partial = beside(out, "-state-partial")
            shutil.copytree(newest, partial, dirs_exist_ok=True)
            partial.rename(kept)
        remove(folder)

    train.remove_checkpoints = keep


def _run(
    arguments: list[str], out: Path, kill: tuple[int, int] | None, environment: dict[str, str]
) -> None:
    """The target of a process."""
    os.environ.update(environment)
    output = os.open(
        beside(out, f"-{environment['RANK']}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(output, 1)
    os.dup2(output, 2)
    # ignored in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from sa_zoo.cli import app

    try:
        _keep_state(out)
        _watch(out, kill, beside(out, "-changes.log"))
        app(arguments)
    except SystemExit as code:
        sys.stdout.flush()
        os._exit(code.code if isinstance(code.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # a traceback
    os._exit(0)


def start(
    config: Path,
    out: Path,
    kill: tuple[int, int] | None = None,
    processes: int = 1,
    resume: bool = False,
) -> list[Any]:
    """Start `sa-zoo train` in one process per rank."""
    port = free_port()
    started = []
    for rank in range(processes):
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": str(rank)}
        if processes > 1:
            environment |= {
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        arguments = ["train", str(config), "--out", str(out)]
        if resume:
            arguments.append("--resume")
        mine = None if rank else kill
        process = FRESH.Process(target=_run, args=(arguments, out, mine, environment), daemon=True)
        process.start()
        started.append(process)
    return started


def finish(processes: list[Any], grace: float = 300) -> list[int]:
    """Exit codes, or the negative numbers of the signals that ended the processes.

    When one has failed, the others get `grace` seconds before they are killed, as torchrun and accelerate do.
    """
    while any(process.is_alive() for process in processes):
        wait([process.sentinel for process in processes if process.is_alive()], timeout=300)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.join(grace)
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def resumed(config: Path, out: Path, processes: int = 1) -> None:
    """Resume until the run is finished; a run without a folder is started."""
    codes = finish(start(config, out, processes=processes, resume=(out / "train.toml").exists()))
    assert codes == [0] * processes, (codes, said(out))


def said(out: Path) -> str:
    return "\n".join(
        path.read_text() for path in sorted(beside(out, "").parent.glob(f"{out.name}-[0-9].log"))
    )


def state_of(out: Path) -> dict[str, Any]:
    """Everything that a finished run has computed: bytes of tensors, and numbers without times."""
    kept = beside(out, "-state")
    rest = json.loads((kept / "state.json").read_text())
    metrics = json.loads((out / "metrics.json").read_text())
    times = {"seconds", "step_seconds", "cpu_seconds"}
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return {
        "weights and optimizer": (kept / "state.safetensors").read_bytes(),
        "optimizer's numbers": [rest["scalars"], rest["groups"]],
        "counters": {k: v for k, v in rest["counters"].items() if k not in times | {"history"}},
        "history": [{k: v for k, v in line.items() if k not in times} for line in history],
        "published": [path.read_bytes() for path in sorted(out.glob("*.safetensors"))],
        "config": [path.read_bytes() for path in sorted(out.glob("*config.json"))],
        "results": [metrics[key] for key in ("test", "validation", "parameters", "data")],
        "files": sorted(path.relative_to(out).as_posix() for path in out.rglob("*")),
    }


def differences(out: Path, expected: dict[str, Any]) -> list[str]:
    """What is lost or left over in a finished run, by name; an empty list if nothing."""
    found = state_of(out)
    empty = [path.name for path in out.rglob("*") if path.is_file() and not path.stat().st_size]
    beside = [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]
    return [name for name in expected if found[name] != expected[name]] + empty + beside
