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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus")
    parser.add_argument("--found", type=Path, default=ROOT / "fuzz-found")
    arguments, started, rows, lost = parser.parse_args(), time.perf_counter(), [], 0
    for name, target in TARGETS.items():
        found, log = arguments.found / name, arguments.found / f"{name}.log"
        found.mkdir(parents=True, exist_ok=True)
        options = [
            str(found),
            *([str(arguments.corpus / name)] if (arguments.corpus / name).is_dir() else []),
        ]
        options += [
            f"-max_total_time={60 * arguments.minutes / len(TARGETS):.0f}",
            f"-rss_limit_mb={MEGABYTES}",
        ]
        options += [
            "-timeout=60",
            f"-artifact_prefix={arguments.found}/crash-{name}-",
            "-print_final_stats=1",
        ]
        status, text = fuzz(target, options, log), log.read_text(errors="replace")
        executed = re.findall(r"number_of_executed_units:\s+(\d+)", text)
        peak, edges = re.findall(r"peak_rss_mb:\s+(\d+)", text), re.findall(r"cov: (\d+)", text)
        lost += (finding := bool(status) or not executed)
        outcome = (
            "a finding"
            if finding
            else f"no finding; {edges[-1]} edges reached, at most {peak[-1]} MB"
        )
        rows.append((name, int(executed[-1]) if executed else 0, outcome))
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
