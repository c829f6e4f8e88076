"""bench.py, benchmark.py and timing.py: what is counted is right; measured times are not tested."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import bench
import benchmark
import pytest
import timing
import torch
from benchmark import Case, Subject, measure, run_cases, step
from torch import nn
from typer.testing import CliRunner

from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import Quadratic

CPU = torch.device("cpu")
PIXELS = 3 * 5 * 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, 11)

    def forward(self, x):
        return self.linear(x.flatten(1))


class Twice(Net):
    """The same at twice the cost."""

    def forward(self, x):
        return (super().forward(x) + super().forward(x)) / 2


def images() -> torch.Tensor:
    return torch.randn(2, 3, 5, 7)


def case(**subjects: Subject) -> Case:
    return Case("net", "inference, float32", 2, list(subjects)[-1], lambda: subjects)


def test_runs_take_turns_and_the_first_round_does_not_count():
    order = []
    times = timing.in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU
    )
    assert order == ["a", "b"] * 4
    assert [len(seconds) for seconds in times.values()] == [3, 3]


def test_the_peak_is_the_most_held_at_a_time():
    def run():
        first = torch.empty(1_000_000)
        del first
        torch.empty(3_000_000).add_(1)
        torch.empty(2_000_000).add_(1)

    assert timing.peak_bytes(run, CPU) == pytest.approx(12_000_000, rel=1e-3)


@pytest.mark.parametrize(
    ("training", "products"), [(False, 1), (True, 2)]
)  # no gradient of the images
def test_work_is_counted_per_image_and_needed_is_the_least_of_those_that_compute_the_same(
    training, products
):
    once = products * PIXELS * 11 / 1e9
    nets = {"lean": Net(), "double": Twice(), "other": Twice()}
    functions = {"lean": "f", "double": "f", "other": "g"}
    subjects = {
        key: Subject(step(net.train(training), images()), function=functions[key])
        for key, net in nets.items()
    }
    rows = {row["subject"]: row for row in measure(case(**subjects), 1, CPU)}
    assert [rows[key]["gmacs"] for key in nets] == pytest.approx([once, 2 * once, 2 * once])
    assert [rows[key]["needed"] for key in nets] == pytest.approx([once, once, 2 * once])
    assert rows["other"]["speed"] == rows["other"]["memory"] == 1.0
    assert all(
        row["milliseconds"] > 0 and row["images"] == 2 and row["ceiling"] > 0
        for row in rows.values()
    )


def test_speed_is_the_median_over_rounds_of_the_ratio_to_the_yardstick(monkeypatch):
    seconds = {"quick": [1.0, 2.0, 4.0], "yardstick": [7.0, 10.0, 12.0]}
    monkeypatch.setattr(
        benchmark, "in_turns", lambda runs, *_: {name: seconds.get(name, [0.5]) for name in runs}
    )
    monkeypatch.setattr(
        benchmark, "matrix_products", lambda *_: (3.0, [lambda: None, lambda: None])
    )
    subjects = {name: Subject(step(Net().eval(), images())) for name in seconds}
    quick, yardstick = measure(case(**subjects), 3, CPU)
    assert quick["speed"] == 5.0 and yardstick["speed"] == 1.0
    assert quick["milliseconds"] == 1000.0  # the median, for 2 images
    assert quick["ceiling"] == pytest.approx(quick["needed"] / 1.0 / (3.0 / 0.5))


def test_a_compiled_subject_has_the_work_of_what_it_compiles():
    net, x = Net().eval(), images()
    plain, compiled = step(net, x), step(net, x, compiled=lambda x: torch.zeros(2, 11))
    made, _ = measure(case(compiled=Subject(compiled, counted=plain), plain=Subject(plain)), 1, CPU)
    assert made["gmacs"] == pytest.approx(PIXELS * 11 / 1e9)


def test_half_precision_is_autocast_in_training_and_gradients_are_made():
    seen = []
    net = Net().train()
    net.linear.register_forward_hook(
        lambda layer, _, output: seen.append((layer.weight.dtype, output.dtype))
    )
    step(net, images(), dtype=torch.bfloat16)()
    assert seen == [(torch.float32, torch.bfloat16)]
    assert net.linear.weight.grad.shape == (11, PIXELS)
    step(net.eval(), images())()
    assert seen[1] == (torch.float32, torch.float32)


@pytest.mark.parametrize("training", [False, True])
def test_a_route_is_forced_for_the_whole_step(training, monkeypatch):
    layer = Attention(5, 2, (Quadratic,), (3, 7)).train(training)
    routes, X, by_axes = [], torch.randn(1, 3, 7, 5), layer.by_axes
    monkeypatch.setattr(layer, "by_axes", lambda x: routes.append("by axes") or by_axes(x))
    step(layer, X, "by axes")()
    assert routes == ["by axes"]
    step(layer, X)()
    assert routes == ["by axes"]


def test_a_run_is_added_to_the_file_after_each_case_and_other_runs_stay(tmp_path):
    path = tmp_path / "made" / "result.json"
    net = Net().eval()

    def broken():
        raise OSError("the machine has gone")

    good = case(net=Subject(step(net, images())))
    bad = Case("net", "training, float32", 2, "net", broken)
    run_cases([good], 1, CPU, "first", path)
    with pytest.raises(OSError, match="has gone"):
        run_cases([good, bad], 1, CPU, "second", path)
    found = json.loads(path.read_text())
    assert [run["command"] for run in found["runs"]] == ["first", "second"]
    assert [len(run["rows"]) for run in found["runs"]] == [1, 1]
    assert found["runs"][1]["rows"][0].keys() == measure(good, 1, CPU)[0].keys()
    assert found["runs"][0]["conditions"]["torch"] == version("torch")
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected a new file or one of this command"):
        run_cases([], 1, CPU, "", path)
    assert path.read_text() == "[1]"


def test_a_missing_compiler_is_reported(tmp_path):
    """In a process of its own: torch remembers which compiler it found."""
    settings = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, bench.__file__, "--compile", "default"],
        env={**os.environ, **settings, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1
        and "--compile: got 'default', expected a mode of torch.compile, and a compiler"
        in done.stderr
    )


def test_bench_on_the_command_line(tmp_path):
    out = tmp_path / "result.json"
    options = [
        "--batch",
        "2",
        "--threads",
        "1",
        "--rounds",
        "1",
        "--phase",
        "inference, bf",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(bench.app, ["sa_quadratic_tiny_cifar", *options])
    assert done.exit_code == 0, done.output
    assert (
        "| sa_quadratic_tiny_cifar | inference, bfloat16 | definition, float32 | 2 |" in done.output
    )
    (run,) = json.loads(out.read_text())["runs"]
    assert run["conditions"]["threads"] == run["conditions"]["rounds"] == 1
    assert {row["subject"] for row in run["rows"]} >= {
        "as built",
        "folded",
        "3x3 convolutions",
        "resnet18_cifar",
    }


MISTAKES = {
    "an unknown model": (
        ["sa_quadratik"],
        "got 'sa_quadratik', expected a name that timm lists, such as resnet18_cifar",
    ),
    "an unknown phase": (
        ["--phase", "cooking"],
        "got 'cooking', expected the beginning of one of inference",
    ),
    "an unknown way to compile": (
        ["--compile", "fast"],
        "--compile: got 'fast', expected a mode of torch.compile",
    ),
    "an unknown device": (
        ["--device", "abacus"],
        "--device: got 'abacus', expected an available one",
    ),
    "a device without a clock": (
        ["--device", "meta"],
        "--device: got 'meta', expected cpu or cuda",
    ),
    "layers of no model": (["--side", "3", "--routes"], "--side: got no MODEL"),
    "layers of a CNN": (
        ["resnet18_cifar", "--side", "3"],
        "--side: got 'resnet18_cifar' as the first model",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_anything_is_measured(mistake, tmp_path):
    arguments, message = MISTAKES[mistake]
    done = CliRunner().invoke(bench.app, [*arguments, "--json", str(tmp_path / "result.json")])
    assert isinstance(done.exception, ValueError) and message in str(done.exception)
    assert list(tmp_path.iterdir()) == []
