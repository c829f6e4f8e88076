"""results/runs.toml and scripts/reproduce.py: rows are valid and fair, and the queue can be stopped at any time."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import timm
import torch

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.cost import training_macs
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.training.config import Config, load_config

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "results" / "runs.toml").read_text(encoding="utf-8"))
CONFIGS = {}
for row in TABLE["run"]:
    verb, _, recipe = row.get("command", "train tiny").partition(" ")
    if verb == "train":
        settings = row.get("set", "").format(**TABLE["short"]).split()
        model = row["name"].partition(".")[0]
        CONFIGS[row["name"]] = load_config(recipe, [f"model.name={model}", *settings])


def pflop(config: Config) -> float:
    with torch.device("meta"):
        model = timm.create_model(config.model.name)
    small = config.augment.small_epochs
    macs = (config.train.epochs - small) * training_macs(model, (3, 32, 32))
    macs += small * training_macs(model, (3, 24, 24)) if small else 0
    return 6 * macs * 45_000 / 1e15


@pytest.mark.parametrize("name", ["pyramid", "pyramid_h5", "quadratic", "quadratic_kernel"])
def test_rows_that_are_compared_have_equal_work(name):
    work = pflop(CONFIGS[f"sa_{name}_tiny_cifar"])
    assert work == pytest.approx(pflop(CONFIGS["resnet_tiny_cifar"]), rel=0.05)


def test_a_tenth_of_the_images_takes_a_third_of_the_steps():
    for name, config in CONFIGS.items():
        if name.endswith("_tenth"):
            every = CONFIGS[name.replace("_tenth", "_all")]
            assert 3 * config.train.epochs == 10 * every.train.epochs
            assert config.data.name == "data/tenth"


SMALL = (
    "data.name=digits data.title=digits train.epochs=5 train.batch_size=200 data.image_size=8 "
    "model.args.embed_dim=16 model.args.depth=1 model.args.patch_size=2"
)
ROWS = f"""
[short]
small = "{SMALL}"

[[run]]
name = "sa_quadratic_tiny_cifar.wrong"
command = "train quickstart"
set = "{{small}} optim.name=none"
after = "sa_quadratic_tiny_cifar-0"

[[run]]
name = "sa_quadratic_tiny_cifar"
command = "train quickstart"
set = "{{small}}"
"""


def test_the_queue_stops_resumes_and_leaves_what_is_finished(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs.toml").write_text(ROWS)
    run = tmp_path / "runs" / "sa_quadratic_tiny_cifar-0"

    def reproduce(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "scripts/reproduce.py", "runs", "--data", str(tmp_path), *more],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    first = reproduce()
    while first.poll() is None and not (run / "history.jsonl").exists():
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    assert "the same command continues" in first.communicate()[1]
    logs = tmp_path / "runs" / "logs"
    assert list((run / "checkpoints").iterdir())
    assert not (logs / "sa_quadratic_tiny_cifar.wrong-0.log").exists()
    assert "tiny_cifar.wrong-0" in reproduce().communicate()[1]
    log = (logs / "sa_quadratic_tiny_cifar.wrong-0.log").read_text()
    assert "expected a timm optimizer" in log
    assert read_metrics(run).test.n == 354
    written = {path: path.stat().st_mtime_ns for path in run.glob("*")}
    last = reproduce("--only", "*cifar")
    assert last.communicate()[1] == "" and last.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in run.glob("*")} == written
