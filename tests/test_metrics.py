"""The schema of metrics.json."""

import json

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


@pytest.mark.parametrize(("right", "n"), [(0, 5), (7, 13), (13, 13), (8711, 10007)])
def test_the_margin_is_half_of_the_wilson_interval(right, n):
    interval = binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert margin(right / n, n) == pytest.approx((interval.high - interval.low) / 2, rel=1e-4)


def test_metrics_read_back_equal_and_hold_only_measurements(tmp_path):
    assert read_metrics(tmp_path) == Metrics()
    scores = {"top1": 0.7, "top5": 0.9, "loss": 1.1, "n": 13}
    metrics = Metrics(model="test_vit", test=Scores(**scores), train=Training(epochs=3))
    assert write_metrics(tmp_path, metrics) == read_metrics(tmp_path) == metrics
    written = json.loads((tmp_path / "metrics.json").read_text())
    train = {"epochs": 3}
    assert written == {"version": 1, "model": "test_vit", "test": scores, "train": train}
