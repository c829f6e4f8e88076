"""benchmark.py and scaling.py: what is counted is right; times are looked at, not tested."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sa_zoo.analysis import benchmark
from sa_zoo.cli import app

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3 * 5 * 7, 11)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.attn_drop(self.linear(x.flatten(1)))


def test_runs_take_turns_and_the_first_round_does_not_count():
    order = []
    times = benchmark.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU)
    assert order == ["a", "b"] * 4
    assert [len(taken) for taken in times.values()] == [3, 3]


def test_the_peak_is_the_most_held_at_a_time():
    def run():
        first = torch.empty(1_000_000)
        del first
        torch.empty(3_000_000).add_(1)
        torch.empty(2_000_000).add_(1)

    assert benchmark.peak_bytes(run, CPU) == pytest.approx(12_000_000, rel=1e-3)


def test_rows_say_what_was_run_and_relative_to_what():
    networks = {"as built": Net(), "explicit": Net()}
    rows = benchmark.bench("net", networks, torch.randn(2, 3, 5, 7), rounds=1)
    by_phase = {}
    for row in rows:
        by_phase.setdefault(row.phase, []).append(row)
    assert tuple(by_phase) == benchmark.PHASES
    assert [row.network for row in by_phase["inference, bfloat16"]] == ["as built", "explicit, float32"]
    for phase, present in by_phase.items():
        products = 1 if phase.startswith("inference") else 2  # no gradient of the images
        for row in present:
            assert row.gmacs == pytest.approx(products * 3 * 5 * 7 * 11 / 1e9)
            assert row.milliseconds > 0 and row.batch == 2 and row.ceiling > 0
    assert all(row.speed == 1.0 and row.memory == 1.0 for row in rows if row.network == "explicit")
    assert networks["as built"].attn_drop.p == 0.0 and networks["as built"].training


def test_speed_is_the_median_over_rounds_of_how_much_longer_the_yardstick_takes(monkeypatch):
    taken = {"as built": [1.0, 2.0, 4.0], "explicit": [7.0, 10.0, 12.0]}
    monkeypatch.setattr(benchmark, "ceiling", lambda *_: 1.0)
    monkeypatch.setattr(benchmark, "in_turns", lambda *_: taken)
    networks = {"as built": Net(), "explicit": Net()}
    quick, yardstick = benchmark.bench("net", networks, torch.randn(5, 3, 5, 7), 3, "inference, float32")
    assert quick.speed == 5.0 and yardstick.speed == 1.0
    assert quick.milliseconds == 400.0


def test_phases_can_be_chosen():
    rows = benchmark.bench("net", {"explicit": Net()}, torch.randn(2, 3, 5, 7), 1, "training")
    assert [row.phase for row in rows] == list(benchmark.PHASES[2:])
    failed = CliRunner().invoke(app, ["bench", "--phase", "cooking"])
    assert failed.exit_code == 1 and "got 'cooking', expected the beginning of one of inference" in failed.output


def test_bench_on_the_command_line(tmp_path):
    out = tmp_path / "bench" / "result.json"
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "sa_quadratic_tiny_cifar",
            "--batch",
            "2",
            "--threads",
            "1",
            "--rounds",
            "1",
            "--side",
            "3",
            "--side",
            "5",
            "--json",
            str(out),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "| sa_quadratic_tiny_cifar | inference, bfloat16 | explicit, float32 |" in done.output
    result = json.loads(out.read_text())
    assert result["conditions"]["threads"] == 1 and result["conditions"]["torch"] == torch.__version__
    assert {row["network"] for row in result["networks"]} >= {"as built", "folded", "resnet18_cifar"}
    assert [(row["network"], row["side"]) for row in result["layer"]] == [
        *[("as built", 3), ("explicit", 3), ("as built", 5), ("explicit", 5)]
    ]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_bench_says_which_names_there_are():
    done = CliRunner().invoke(app, ["bench", "sa_quadratik"])
    assert done.exit_code == 1
    assert "got 'sa_quadratik', expected a name that timm lists, as resnet18_cifar" in done.output


MISTAKES = {
    "a device that is not": (["--device", "abacus"], "--device: got 'abacus', expected one that is at hand"),
    "one without a clock": (["--device", "meta"], "--device: got 'meta', expected cpu or cuda"),
    "layers of a CNN": (["resnet18_cifar", "--side", "3"], "--side: got 'resnet18_cifar' as the first model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_anything_is_measured(mistake, tmp_path):
    arguments, message = MISTAKES[mistake]
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", str(tmp_path / "result.json")])
    assert done.exit_code == 1 and message in done.output
    assert list(tmp_path.iterdir()) == []


def test_results_of_models_are_kept_as_they_come(tmp_path, monkeypatch):
    out = tmp_path / "result.json"

    def broken(*_):
        raise OSError("the machine has gone")

    monkeypatch.setattr(benchmark, "growth", broken)
    arguments = ["sa_quadratic_tiny_cifar", "--phase", "inference, float32", "--batch", "2", "--rounds", "1"]
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", str(out)])
    assert done.exit_code == 1 and "the machine has gone" in done.output
    assert len(json.loads(out.read_text())["networks"]) == 5


def test_explicit_layers_whose_maps_would_not_fit_are_left_out(monkeypatch):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_val = nn.Linear(2 * 3, 3)

        def forward(self, X):
            return self.W_val(torch.cat([X, X], dim=-1))

    monkeypatch.setattr(benchmark, "MAPS", 4 * 2 * 5**4)
    rows = benchmark.growth(lambda side: {"as built": Layer(), "explicit": Layer()}, [5, 7], 1, CPU)
    assert [(row.network, row.side) for row in rows] == [("as built", 5), ("explicit", 5), ("as built", 7)]
    assert rows[0].bytes >= 4 * (2 * 3 + 3)
