"""python scripts/prove_fuzz.py --minutes 20

Coverage-guided fuzzing (atheris, which is not among the dependencies: pip install atheris) of everything that reads a
file of somebody else, as tests/fuzz_targets.py calls it. Inputs that reached new code, or failed, are put in --found.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
NAMES = ("config", "weights", "recipe", "metrics", "published", "image", "network")
MEGABYTES = 4096  # of the whole process, libraries included; more is a finding


def fuzz(name: str) -> None:
    """In a process of its own, as libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["sa_zoo", "json", "tomllib", "PIL", "pydantic"]):
        from fuzz_targets import TARGETS
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *sys.argv[3:]], lambda data: target(data))
    atheris.Fuzz()


def main() -> None:
    if sys.argv[1:2] == ["--target"]:
        fuzz(sys.argv[2])
        return
    from reliability import record

    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--corpus", type=Path, default=ROOT / "tests" / "corpus")
    parser.add_argument("--found", type=Path, default=ROOT / "fuzz-found")
    arguments, started = parser.parse_args(), time.perf_counter()
    rows, lost = [], 0
    arguments.found.mkdir(exist_ok=True)
    for name in NAMES:
        kept = arguments.corpus / name
        with tempfile.TemporaryDirectory() as found:
            command = [sys.executable, __file__, "--target", name, found, *([str(kept)] if kept.is_dir() else [])]
            command += [f"-max_total_time={60 * arguments.minutes / len(NAMES):.0f}", f"-rss_limit_mb={MEGABYTES}"]
            command += ["-timeout=60", f"-artifact_prefix={arguments.found}/crash-{name}-", "-print_final_stats=1"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=found)
            counts = re.findall(r"number_of_executed_units:\s+(\d+)", done.stderr)
            peak = re.findall(r"peak_rss_mb:\s+(\d+)", done.stderr)
            coverage = re.findall(r"cov: (\d+)", done.stderr)
            crashed = done.returncode != 0 or not counts
            lost += crashed
            outcome = f"{coverage[-1] if coverage else '?'} edges, at most {peak[-1] if peak else '?'} MB"
            rows.append((name, int(counts[-1]) if counts else 0, "a finding" if crashed else f"no finding; {outcome}"))
            print(name, rows[-1], flush=True)
            if crashed:
                print(done.stderr[-3000:], flush=True)
            for path in sorted(Path(found).iterdir(), key=lambda path: path.stat().st_size)[:400]:
                if path.is_file() and path.stat().st_size < 1000:
                    (arguments.found / name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, arguments.found / name)
    record(
        "fuzz",
        "Coverage-guided fuzzing of our readers of configurations, weights, recipes, metrics and images, and of "
        "loading a network with random values in config.json: an input is read or refused with a message. No traceback, no "
        f"more than {MEGABYTES} MB, a minute at most.",
        f"python scripts/prove_fuzz.py --minutes {arguments.minutes:g}",
        rows,
        lost,
        started,
        ("torch", "timm", "safetensors", "pydantic", "pillow", "atheris", "hypothesis"),
    )


if __name__ == "__main__":
    main()
