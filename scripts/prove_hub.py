"""python scripts/prove_hub.py --runs 200

Publishes through random faults to a Hub in this process (tests/hub_server.py), which the official client reaches by
HTTP, and checks after each attempt: main holds the old or the new revision completely, commits of others stay, tags are
only on complete revisions, local files are unchanged, errors are messages; and that the next attempt finishes the job.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

from hub_faults import Trial, trial  # noqa: E402
from hub_server import TOKEN  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from model_folders import make_run  # noqa: E402
from reliability import record  # noqa: E402

import sa_zoo  # noqa: E402, F401  registers the names
from sa_zoo.publishing import remote  # noqa: E402


def quietly(seed: int, finished: Path, place: Path) -> Trial:
    with contextlib.redirect_stdout(io.StringIO()):
        result = trial(seed, finished, place)
    print(seed, result, file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    arguments, started = parser.parse_args(), time.perf_counter()
    runs = arguments.runs
    warnings.simplefilter("ignore")
    remote.WAITS = (0.01, 0.02)  # as many attempts as tests have time for
    os.environ["HF_TOKEN"] = TOKEN
    done: Counter[tuple[str, str]] = Counter()
    lost = 0
    with tempfile.TemporaryDirectory() as place:
        constants.HF_TOKEN_PATH = f"{place}/no-login"
        finished = make_run(Path(place) / "test_vit", "test_vit", num_classes=7)
        with ProcessPoolExecutor(arguments.processes, get_context("fork")) as pool:
            results = list(pool.map(quietly, range(runs), repeat(finished), repeat(Path(place))))
        for result in results:
            lost += bool(result.broken)
            done[" + ".join(result.kinds) or "no fault was met", result.outcome] += 1
    single: Counter[tuple[str, str]] = Counter()
    for (kinds, outcome), count in done.items():
        single[kinds if " + " not in kinds else "several kinds at once", outcome] += count
    record(
        "hub",
        "Publish a folder to a Hub over HTTP through random faults; if that fails, again without. After each attempt "
        "main holds the old or the new revision completely, commits of others stay, tags are on complete revisions "
        "only, local files are unchanged; the second attempt finishes the job, or refuses a repository that others "
        "filled first.",
        f"python scripts/prove_hub.py --runs {runs} --processes {arguments.processes}",
        [
            (kinds, count, f"first attempt: {outcome}")
            for (kinds, outcome), count in sorted(single.items())
        ],
        lost,
        started,
        ("torch", "timm", "transformers", "huggingface_hub"),
    )


if __name__ == "__main__":
    main()
