"""What the proof scripts share: one JSON file per proof, from which docs/reliability.md is rendered."""

import json
import os
import platform
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reliability"


def hardware() -> str:
    """Processor, number of cores that this process may use, and memory of the machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [
        line.split(":", 1)[1].strip()
        for line in cpuinfo.splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, {memory:.0f} GiB"


def record(
    name: str,
    what: str,
    command: str,
    details: Iterable[tuple[str, int, str]],
    lost: int,
    started: float,
    packages: Iterable[str] = ("torch",),
) -> Path:
    """Writes docs/reliability/NAME.json; `details` has a row (kind of trial, how many, outcome), `started` is
    `time.perf_counter()` at the start."""
    rows = [list(row) for row in details]
    result = {
        "what": what,
        "command": command,
        "tried": sum(row[1] for row in rows),
        "lost": lost,
        "details": rows,
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "seconds": round(time.perf_counter() - started, 1),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
