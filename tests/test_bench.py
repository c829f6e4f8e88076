"""scripts/bench.py: it measures every kind of case, and what it counts is right; times are not tested."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from timm.data import resolve_model_data_config

from sa_zoo.cost import cost_of

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_subjects_of_a_case_and_their_work(tmp_path):
    result = tmp_path / "made" / "result.json"
    once = ["--rounds", "1", "--batch", "2", "--threads", "1", "--json", str(result)]
    done = bench("sa_quadratic_tiny_cifar", "--side", "5", "--phase", "inference, f", *once)
    assert done.returncode == 0, done.stderr
    done = bench("sa_pyramid_h5_tiny_cifar", "--against", "resnet_tiny_cifar", "--deployed", *once)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(result.read_text())["runs"]  # of both calls
    found = {(row["model"], row["phase"], row["subject"]): row for row in first["rows"]}
    kind = ("sa_quadratic_tiny_cifar", "inference, float32")
    rows = {subject: row for (*case, subject), row in found.items() if tuple(case) == kind}
    assert rows.keys() >= {
        "as built",
        "deployed",
        "definition",
        "3x3 convolutions",
        "resnet18_cifar",
    }
    network = timm.create_model(kind[0]).eval()
    cost = cost_of(network, resolve_model_data_config(network)["input_size"])
    assert rows["definition"]["gmacs"] == pytest.approx(cost.macs / 1e9, rel=0.02)
    assert rows["definition"]["speed"] == rows["definition"]["memory"] == 1
    assert ("one layer of sa_quadratic_tiny_cifar, 5x5 tokens", kind[1], "by axes") in found
    phases = {row["phase"] for row in second["rows"]}
    assert len(phases) == 2 and {row["images"] for row in second["rows"]} == {1, 8, 50, 256}
    assert {row["subject"] for row in second["rows"]} == {
        "resnet_tiny_cifar",
        "as built",
        "deployed",
        "taps",
    }
    assert first["conditions"]["threads"] == first["conditions"]["rounds"] == 1


def test_a_file_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "result.json").write_text("[1]")
    done = bench("resnet_tiny_cifar", "--json", str(tmp_path / "result.json"))
    assert done.returncode == 1 and "expected a new file" in done.stderr
    assert (tmp_path / "result.json").read_text() == "[1]"


def test_committed_measurements_do_not_contradict_each_other():
    """The same subject, phase and batch of one machine, measured twice, took times within a factor of two."""
    for path in (ROOT / "results").glob("benchmark-*.csv"):
        with path.open(encoding="utf-8") as file:
            times: dict[tuple[str, ...], list[float]] = {}
            for row in csv.DictReader(file):
                network = row["model"] if row["subject"] == "as built" else ""
                kind = (network, row["phase"], row["subject"], row["batch_size"])
                if network or row["subject"].startswith("resnet"):
                    times.setdefault(kind, []).append(float(row["step_time"]))
        for kind, found in times.items():
            assert max(found) < 2 * min(found), kind
