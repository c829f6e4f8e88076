"""python scripts/prove_input.py

Loads each hostile model folder of tests/hostile.py by this package, by timm and by transformers, each in a process of
its own: whether it was refused, whether code was executed, and how much memory that took.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import FOLDERS  # noqa: E402
from model_folders import make_run  # noqa: E402
from reliability import record  # noqa: E402

import sa_zoo  # noqa: E402, F401  registers the names
from sa_zoo.folders.opened import open_folder  # noqa: E402
from sa_zoo.interchange.transformers_export import transformers_files  # noqa: E402

SECONDS, GIGABYTES = 60, 12  # what a process may take
BOUND = 1.0  # GiB that this package may take for a hostile folder, beyond what importing the libraries takes
LOADERS = {
    "sa_zoo": "from sa_zoo.folders.opened import open_model as load",
    "timm": "import timm; load = lambda folder: timm.create_model(f'local-dir:{folder}', pretrained=True)",
    "transformers": "from transformers import AutoModelForImageClassification as m; load = m.from_pretrained",
}
CODE = """
import resource, sys, warnings
import torch, timm, transformers, sa_zoo
{loader}
from transformers import AutoModelForImageClassification
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    pid = __import__("os").fork()  # the imports are paid once
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, ({limit} << 30,) * 2)
        __import__("signal").alarm({seconds})
        before = peak()
        try:
            load(folder)
            outcome = "loaded"
        except (ValueError, OSError) as error:
            outcome = "refused"
        except Exception as error:
            outcome = "traceback"
        print("RESULT", outcome, (peak() - before) / 2**20, flush=True)
        __import__("os")._exit(0)
    if __import__("os").waitpid(pid, 0)[1]:
        print("RESULT killed 0", flush=True)
"""


def main() -> None:
    started, rows, lost = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as place:
        harmless = make_run(
            Path(place) / "harmless",
            "sa_quadratic_cifar",
            embed_dim=13,
            depth=2,
            num_heads=3,
            hidden_dim=11,
        )
        opened = open_folder(harmless)
        opened.with_files(transformers_files(opened))
        folders = []
        for loader in LOADERS:
            (Path(place) / loader).mkdir()
        for loader, code in LOADERS.items():
            folders = []
            for number, (change, _) in enumerate(FOLDERS.values()):
                folders.append(Path(shutil.copytree(harmless, Path(place) / loader / str(number))))
                change(folders[-1])
            code = CODE.format(loader=code, limit=GIGABYTES, seconds=SECONDS)
            done = subprocess.run(
                [sys.executable, "-c", code, *map(str, folders)],
                env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
                cwd=Path(place) / loader,
                capture_output=True,
                text=True,
            )
            results = [
                line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")
            ]
            assert len(results) == len(FOLDERS), done.stderr[-2000:]
            outcomes = Counter(outcome for outcome, _ in results)
            executed = list(Path(place).rglob("executed"))
            peak = max(float(memory) for _, memory in results)
            for (name, _), (outcome, memory) in zip(FOLDERS.items(), results, strict=True):
                print(loader, name, outcome, memory, flush=True)
                if loader == "sa_zoo":
                    lost += outcome != "refused" or float(memory) > BOUND
            summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            code_ran = f"code executed by {len(executed)}" if executed else "no code executed"
            rows.append(
                (
                    f"loaded by {loader}",
                    len(FOLDERS),
                    f"{summary}; {code_ran}; at most {peak:.2f} GiB more",
                )
            )
    record(
        "input",
        "Hostile model folders (foreign architectures and weights, a billion parameters, NaN, wrong types, nesting, "
        "damaged and disguised weights), each in a process of its own. This package has to refuse every one with a "
        f"message, without executing code, within {BOUND:g} GiB and {SECONDS} seconds; what timm and transformers do "
        "with the same folders is reported for comparison (killed: out of time or memory).",
        "python scripts/prove_input.py",
        rows,
        lost,
        started,
        ("torch", "timm", "transformers", "safetensors"),
    )


if __name__ == "__main__":
    main()
