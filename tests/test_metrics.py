"""The schema of metrics.json."""

import json

import pytest

from sa_zoo.folders.metrics import Metrics, Scores, Training, read_metrics, write_metrics

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


def test_a_folder_without_metrics_has_measured_nothing(tmp_path):
    assert read_metrics(tmp_path) == Metrics()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 2}', r"expected version 1 of its schema, but version: got 2"),
        ('{"test": {"top1": 0.5}}', r"test.top5: got .*; test.loss"),
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
