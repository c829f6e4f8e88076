"""The schema of metrics.json."""

import json
from pathlib import Path

import pytest
from scipy.stats import binomtest

from sa_zoo.folders.metrics import (
    Metrics,
    Scores,
    Training,
    margin,
    read_metrics,
    write_metrics,
)

ROOT = Path(__file__).parents[1]
SCORES = Scores(top1=0.7, top5=0.9, loss=1.1, n=13)


def test_what_is_written_reads_back_equal_and_holds_only_what_was_measured(tmp_path):
    train = Training(epochs=3)
    metrics = Metrics(
        model="test_vit", data="digits", test=SCORES, train=train, environment={"threads": 2}
    )
    assert write_metrics(tmp_path, metrics) == metrics
    assert read_metrics(tmp_path) == metrics
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        "version": 1,
        "model": "test_vit",
        "data": "digits",
        "test": {"top1": 0.7, "top5": 0.9, "loss": 1.1, "n": 13},
        "train": {"epochs": 3},
        "environment": {"threads": 2},
    }


@pytest.mark.parametrize("folder", list((ROOT / "tests/earlier_version").glob("*/metrics.json")))
def test_files_from_before_there_was_a_version_still_read_whole(folder):
    written = json.loads(folder.read_text())
    assert "version" not in written
    assert read_metrics(folder.parent).measured() == {"version": 1, **written}


@pytest.mark.parametrize(("right", "n"), [(0, 5), (7, 13), (13, 13), (8711, 10007)])
def test_the_margin_is_half_of_the_wilson_interval(right, n):
    interval = binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert margin(right / n, n) == pytest.approx((interval.high - interval.low) / 2, rel=1e-4)


def test_a_folder_without_metrics_has_measured_nothing(tmp_path):
    assert read_metrics(tmp_path) == Metrics()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 2}', r"expected version 1 of its schema, but version: got 2"),
        ('{"test": {"top1": 0.5}}', r"test.loss: got .*; test.n"),
        (
            '{"test": {"top1": 1.7, "top5": 1, "loss": 1, "n": 1}}',
            r"test.top1: got 1.7: Input should be less than or equal",
        ),
        ('{"accuracy": 0.5}', r"accuracy: got 0.5: Extra inputs are not permitted"),
        ("[]", r"metrics.json: got a list, expected a JSON object"),
        ("{", r"metrics.json: got a file that is not JSON"),
    ],
)
def test_another_schema_is_refused(tmp_path, text, said):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_metrics(tmp_path)
