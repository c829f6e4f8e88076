"""timing.py, benchmark.py and scaling.py: what is counted is right; times are looked at, not tested."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sa_zoo.analysis import benchmark, timing
from sa_zoo.cli import app
from sa_zoo.kernels import products

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
    times = timing.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU)
    assert order == ["a", "b"] * 4
    assert [len(taken) for taken in times.values()] == [3, 3]


def test_the_peak_is_the_most_held_at_a_time():
    def run():
        first = torch.empty(1_000_000)
        del first
        torch.empty(3_000_000).add_(1)
        torch.empty(2_000_000).add_(1)

    assert timing.peak_bytes(run, CPU) == pytest.approx(12_000_000, rel=1e-3)


def test_what_a_run_keeps_for_the_next_one_counts():
    def run():
        products.ROOM.of("kept", torch.float32, 1_000_000)

    run()
    assert timing.peak_bytes(run, CPU) == pytest.approx(4_000_000, rel=1e-3)


def test_rows_say_what_was_run_and_relative_to_what():
    networks = {"as built": Net(), "explicit": Net()}
    rows = benchmark.bench("net", networks, torch.randn(2, 3, 5, 7), rounds=1)
    by_phase = {}
    for row in rows:
        by_phase.setdefault(row.phase, []).append(row)
    assert tuple(by_phase) == benchmark.PHASES
    assert [row.network for row in by_phase["inference, bfloat16"]] == ["as built", "explicit, float32"]
    for phase, present in by_phase.items():
        inference = phase.startswith("inference")
        for row in present:
            assert row.gmacs == pytest.approx((1 if inference else 2) * 3 * 5 * 7 * 11 / 1e9)  # no gradient of images
            assert row.needed == pytest.approx((1 if inference else 3) * 3 * 5 * 7 * 11 / 1e9)
            assert row.milliseconds > 0 and row.batch == 2 and row.ceiling > 0
    assert all(row.speed == 1.0 and row.memory == 1.0 for row in rows if row.network.startswith("explicit"))
    assert networks["as built"].attn_drop.p == 0.0 and networks["as built"].training


def test_speed_is_the_median_over_rounds_of_how_much_longer_the_yardstick_takes(monkeypatch):
    taken = {"as built": [1.0, 2.0, 4.0], "explicit": [7.0, 10.0, 12.0]}
    monkeypatch.setattr(benchmark, "products", lambda *_: (1.0, [lambda: None]))
    monkeypatch.setattr(benchmark, "in_turns", lambda runs, *_: {name: taken.get(name, [1.0]) for name in runs})
    networks = {"as built": Net(), "explicit": Net()}
    quick, yardstick = benchmark.bench("net", networks, torch.randn(5, 3, 5, 7), 3, "inference, float32")
    assert quick.speed == 5.0 and yardstick.speed == 1.0
    assert quick.milliseconds == 400.0


class Twice(Net):
    """The same at twice the cost."""

    def forward(self, x):
        return (super().forward(x) + super().forward(x)) / 2


def test_work_is_counted_on_the_leanest_evaluation_of_the_same(monkeypatch):
    monkeypatch.setattr(benchmark, "products", lambda *_: (3.0, [lambda: "slow", lambda: "fast"]))

    def in_turns(runs, *_):
        seconds = {"slow": [7.0, 7.0], "fast": [2.0, 1.0]}
        return {name: seconds[run()] if name.startswith("torch.") else [5.0, 5.0] for name, run in runs.items()}

    monkeypatch.setattr(benchmark, "in_turns", in_turns)
    networks = {"as built": Twice(), "folded": Net(), "explicit": Twice(), "another": Twice()}
    once = 3 * 5 * 7 * 11 / 1e9
    for phase, needed in (("inference, float32", once), ("training, float32, dropout", 2 * 3 * once)):
        rows = benchmark.bench("net", networks, torch.randn(2, 3, 5, 7), 1, phase)
        assert rows
        for row in rows:
            alone = 2 * once * (3 if "training" in phase else 1)
            assert row.needed == pytest.approx(alone if row.network == "another" else needed)
            assert row.ceiling == pytest.approx(row.needed / 2.5 / 3.0)  # of 2 images, which take 5 seconds


class Sharing(Net):
    """With work that is done once for all images."""

    def forward(self, x):
        return super().forward(x) + (self.linear.weight.T @ self.linear.weight).sum()


def test_work_for_all_images_is_shared_among_them():
    networks = {"as built": Sharing(), "explicit": Sharing()}
    rows = benchmark.bench("net", networks, torch.randn(5, 3, 5, 7), 1, "inference, float32")
    pixels = 3 * 5 * 7
    assert all(row.needed == pytest.approx((pixels * 11 + pixels * 11 * pixels / 5) / 1e9) for row in rows)


def test_half_precision_is_that_of_weights_in_inference_and_of_autocast_in_training():
    seen = []

    class Seeing(Net):
        def forward(self, x):
            made = super().forward(x)
            seen.append((self.training, self.linear.weight.dtype, made.dtype))
            return made

    benchmark.bench("net", {"as built": Seeing()}, torch.randn(2, 3, 5, 7), 1, "inference, bfloat16")
    assert seen[-1] == (False, torch.bfloat16, torch.bfloat16)
    benchmark.bench("net", {"as built": Seeing()}, torch.randn(2, 3, 5, 7), 1, "training, bfloat16")
    assert seen[-1] == (True, torch.float32, torch.bfloat16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.compile itself
def test_compiled_networks_take_part(monkeypatch):
    compiled = []
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda net, **how: compiled.append((net, how["mode"])) or original(net, **how)
    )
    networks = {"as built": Net(), "folded": Net(), "explicit": Net()}
    rows = benchmark.bench("net", networks, torch.randn(2, 3, 5, 7), 1, "inference, float32", "default")
    assert [row.network for row in rows] == ["as built", "folded", "explicit", "compiled"]
    network, mode = compiled[0]
    assert mode == "default" and torch.equal(network.linear.weight, networks["folded"].linear.weight)


def test_a_machine_without_a_compiler_is_told(tmp_path):
    """In a process of its own: torch remembers which compiler it found."""
    settings = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "sa_zoo", "bench", "--compile", "default"],
        env={**os.environ, **settings, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "error: --compile: expected a compiler that torch.compile can use" in done.stderr


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
    "an unknown way to compile": (["--compile", "fast"], "--compile: got 'fast', expected one of default, reduce-over"),
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
