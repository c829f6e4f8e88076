"""python scripts/prove_fuzz.py --minutes 20

Coverage-guided fuzzing (atheris, which is not among the dependencies: pip install atheris) of everything that reads a
file of somebody else, as tests/fuzz_targets.py calls it. Inputs that reached new code, or failed, are put in --found.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from reliability import record  # noqa: E402

with atheris.instrument_imports(include=["sa_zoo", "json", "tomllib"]):
    from fuzz_targets import TARGETS

MEGABYTES = 4096  # of the whole process, libraries included; more is a finding


def fuzz(target: Callable[[bytes], object], options: list[str], log: Path) -> int:
    """In a process of its own, as libFuzzer ends it; returns its status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    atheris.Setup([sys.argv[0], *options], lambda data: target(data) and None)
    atheris.Fuzz()
    os._exit(0)


def last(pattern: str, log: str) -> int:
    """The last number that a log gives; 0 if it gives none, as of a run of seconds."""
    return int((re.findall(pattern, log) or ["0"])[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus")
    parser.add_argument("--found", type=Path, default=ROOT / "fuzz-found")
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows = []
    lost = 0
    for name, target in TARGETS.items():
        found = arguments.found / name
        log = arguments.found / f"{name}.log"
        found.mkdir(parents=True, exist_ok=True)
        known = arguments.corpus / name
        options = [
            str(found),
            *([str(known)] if known.is_dir() else []),
            f"-max_total_time={60 * arguments.minutes / len(TARGETS):.0f}",
            f"-rss_limit_mb={MEGABYTES}",
            "-timeout=60",
            f"-artifact_prefix={arguments.found}/crash-{name}-",
            "-print_final_stats=1",
        ]
        status = fuzz(target, options, log)
        text = log.read_text(errors="replace")
        executed = last(r"number_of_executed_units:\s+(\d+)", text)
        peak = last(r"peak_rss_mb:\s+(\d+)", text)
        edges = last(r"cov: (\d+)", text)
        finding = status != 0 or executed == 0
        lost += finding
        outcome = f"no finding; {edges} edges reached, at most {peak} MB"
        rows.append((name, executed, "a finding" if finding else outcome))
        print(rows[-1], flush=True)
    record(
        "fuzz",
        "Coverage-guided fuzzing of our readers of configurations, weights, recipes, metrics and images, and of "
        "loading a network with random values in config.json: an input is read or refused with a message. No "
        f"traceback, no more than {MEGABYTES} MB, a minute at most.",
        f"python scripts/prove_fuzz.py --minutes {arguments.minutes:g}",
        rows,
        lost,
        started,
        ("torch", "timm", "safetensors", "pydantic", "pillow", "atheris", "hypothesis"),
    )


if __name__ == "__main__":
    main()
