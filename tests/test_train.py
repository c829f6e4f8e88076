import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import load_file
from tiny_runs import (
    MUON,
    TINY_VIT,
    image_folder,
    noise_images,
    parquet_folder,
    signalled_by,
    tiny_config,
)
from torch.utils.data import DataLoader, get_worker_info

import sa_zoo  # noqa: F401  registers its names with timm
from sa_zoo.cost import training_macs
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.opened import open_model
from sa_zoo.training.config import Config, DataConfig, OptimConfig, dump_config, load_config
from sa_zoo.training.device import report_lost_process
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.training.model import create_model
from sa_zoo.training.optimization import learning_rate_factor, optimizer_of
from sa_zoo.training.progress import Interrupted, Progress
from sa_zoo.training.splits import StreamedSplit
from sa_zoo.training.train import train

ROOT = Path(__file__).parents[1]
# everything that draws random numbers or keeps a state of its own
RANDOM = {
    "model": {"args": {**TINY_VIT, "drop_rate": 0.1, "proj_drop_rate": 0.1}},
    "augment": {
        "crop_padding": 1,
        "flip": True,
        "mixup": 0.3,
        "label_smoothing": 0.1,
    },
    "optim": {"name": "adamw", "clip": 1.0},
    "train": {"epochs": 5, "batch_size": 106, "ema": 0.9},
}


SGD = {"name": "sgd", "lr": 0.05}  # which, unlike Adam, notices a gradient of the wrong size


def history(out: Path) -> list[dict]:
    """The lines of history.jsonl without their times."""
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit."""
    assert history(a) == history(b)
    assert weights(a).keys() == weights(b).keys()
    for key, value in weights(a).items():
        assert torch.equal(value, weights(b)[key]), key
    results = [json.loads((out / "metrics.json").read_text()) for out in (a, b)]
    assert results[0]["test"] == results[1]["test"]


def assert_same_curve(a: Path, b: Path) -> None:
    """To rounding."""
    for one, two in zip(history(a), history(b), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["top1"] == pytest.approx(two["top1"], abs=0.002)
        assert one["validation"]["loss"] == pytest.approx(two["validation"]["loss"], rel=1e-3)
        assert one["validation"]["n"] == two["validation"]["n"]


def signalled(config: Config, out: Path, number: int, once: str) -> None:
    """A run that is stopped by a signal as soon as a file of that pattern is in its folder."""
    stopped = rf"stopped in epoch \d+ after step \d+ of \d+, and saved in {out}"
    with signalled_by(number, out, once), pytest.raises(Interrupted, match=stopped):
        train(config, out)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run and its metrics."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, train(tiny_config(), out).metrics


def test_a_compiled_run_follows_the_same_curve(plain, tmp_path, monkeypatch):
    """As `accelerate launch --dynamo_backend ...` asks for; this backend traces all and builds no kernels."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    compiled, original = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: compiled.append(how) or original(model, **how)
    )
    train(tiny_config(), tmp_path / "run")
    assert [how["backend"] for how in compiled] == ["aot_eager"]
    assert_same_curve(plain[0], tmp_path / "run")
    assert weights(plain[0]).keys() == weights(tmp_path / "run").keys()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with everything random, not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(**RANDOM), out)
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after its first epoch; tests copy it."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    signalled(tiny_config(train={"epochs": 40}), out, signal.SIGINT, "history.jsonl")
    return out


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    rates = [learning_rate_factor(seen, 10, 1000, 0.1) for seen in range(0, 1000, 10)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == pytest.approx([(1 + math.cos(math.pi * i / 90)) / 2 for i in range(90)])
    assert 0 < rates[-1] < 0.001
    assert learning_rate_factor(0, 10, 1000, 0.0) == 1.0


def test_a_run_learns_and_reports_what_it_left_behind(plain):
    out, metrics = plain
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors",
        "config.json",
        "train.toml",
        "metrics.json",
        "history.jsonl",
    }
    assert read_metrics(out) == metrics
    assert (metrics.model, metrics.data) == ("test_vit", "digits")
    assert metrics.test.n == 354
    assert metrics.train.epochs == 2
    assert metrics.train.seconds > 0
    assert metrics.train.cpu_seconds > 0
    # 12 steps of 211 images; a multiply-add is 2 operations, a backward pass costs two forward passes
    macs = training_macs(timm.create_model("test_vit", num_classes=10, **TINY_VIT), (3, 8, 8))
    assert metrics.train.pflop == pytest.approx(2 * 3 * macs * 12 * 211 / 1e15)
    assert metrics.train.images_per_second > 0
    for key in (
        "python",
        "torch",
        "timm",
        "accelerate",
        "device",
        "cpu",
        "threads",
        "processes",
        "sa_zoo_commit",
    ):
        assert key in metrics.environment
    lines = history(out)
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[1]["loss"] < lines[0]["loss"] < 2.5
    # six steps of 211 images an epoch, of which the last ones count here
    rates = [0.003 * learning_rate_factor(seen * 211, 211, 12 * 211, 0.05) for seen in (5, 11)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    # the last epoch is the one that counts
    assert metrics.validation.top1 == lines[-1]["validation"]["top1"]
    assert metrics.validation.loss == pytest.approx(lines[-1]["validation"]["loss"], rel=1e-5)


def test_evaluating_the_folder_gives_the_reported_test_result(plain):
    out, metrics = plain
    assert (
        evaluate_opened(open_model(str(out)), DataConfig(name="digits"), detail=True).test
        == metrics.test
    )


def test_the_effective_config_lies_in_the_folder(plain):
    assert load_config(plain[0] / "train.toml") == tiny_config()


def test_the_same_config_gives_the_same_weights_and_another_seed_others(plain, tmp_path):
    train(tiny_config(), tmp_path / "again")
    assert_same_run(plain[0], tmp_path / "again")
    train(tiny_config(train={"seed": 1}), tmp_path / "other")
    assert history(plain[0]) != history(tmp_path / "other")


@pytest.mark.parametrize(
    ("every", "once"),
    [(0, "checkpoints/epoch-0000[1-4]-step-0000000"), (1, "checkpoints/epoch-*-step-000000[1-9]")],
    ids=["after an epoch", "in mid-epoch"],
)
def test_a_killed_run_resumes_to_the_same_weights(whole, tmp_path, every, once):
    table = {**RANDOM, "train": {**RANDOM["train"], "checkpoint_steps": every}}
    config, out = tmp_path / "killed.toml", tmp_path / "run"
    config.write_text(dump_config(tiny_config(**table)))
    command = [sys.executable, "-m", "sa_zoo", "train", str(config), "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not any(out.glob(once)):
        time.sleep(0.005)
    process.kill()
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert not (out / "metrics.json").exists()
    train(load_config(config), out, resume=True)
    assert_same_run(whole, out)
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_resumes_to_the_same_weights(whole, tmp_path, number):
    table = {**RANDOM, "train": {**RANDOM["train"], "checkpoint_steps": 5}}
    handler = signal.getsignal(
        number
    )  # a shell starts what runs in its background with SIGINT ignored
    signalled(tiny_config(**table), tmp_path / "run", number, "checkpoints/epoch-*")
    assert signal.getsignal(number) == handler
    train(tiny_config(**table), tmp_path / "run", resume=True)
    assert_same_run(whole, tmp_path / "run")


def test_the_time_left_is_that_of_this_process(monkeypatch, capsys):
    now = iter([1000.0, 1010.0])
    monkeypatch.setattr("sa_zoo.training.progress.time.monotonic", lambda: next(now))
    progress = Progress(
        images=1000, done=700, epochs=10, main=True
    )  # resumed; the first 700 images took an hour
    record = {"epoch": 8, "loss": 1.0, "top1": 0.5, "seconds": 3600.0}
    progress.end_epoch(record, done=800, images_per_second=7.0)  # 100 in 10 seconds
    assert capsys.readouterr().out.endswith("7 images/s, 00:20 left\n")


@pytest.mark.parametrize("once", ["checkpoints/epoch-00000-step-*", "checkpoints/epoch-00002-*"])
def test_muon_and_the_record_of_heads_resume_too(tmp_path, once):
    train(tiny_config(**MUON), tmp_path / "whole")
    signalled(tiny_config(**MUON), tmp_path / "run", signal.SIGINT, once)
    train(tiny_config(**MUON), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    files = [tmp_path / name / "heads.safetensors" for name in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("side", [4, 8])
def test_early_epochs_count_as_the_work_of_their_images(tmp_path, side):
    config = tiny_config(**{**MUON, "augment": {"small_epochs": 2, "small_size": side}})
    early = train(config, tmp_path / "run").metrics
    model = timm.create_model("sa_quadratic_tiny_cifar", num_classes=10, **MUON["model"]["args"])
    small, full = (training_macs(model, (3, size, size)) for size in (side, 8))
    assert (small < full) == (side < 8)
    assert early.train.pflop == pytest.approx(2 * 3 * (2 * small + full) * 6 * 211 / 1e15)


def test_batch_norm_and_momentum_resume_too(tmp_path):
    table = {
        "model": {"name": "test_resnet", "args": {}},
        "data": {"image_size": 16},
        "optim": {"name": "sgd", "lr": 0.01},
        "train": {"epochs": 2, "batch_size": 431, "checkpoint_steps": 1},
    }
    train(tiny_config(**table), tmp_path / "whole")
    signalled(tiny_config(**table), tmp_path / "run", signal.SIGINT, "checkpoints/epoch-*")
    train(tiny_config(**table), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_frozen_layers_keep_their_running_statistics(tmp_path):
    config = tiny_config(
        model={"name": "test_resnet", "args": {}, "freeze": "^(conv1|bn1|layer1)"},
        data={"image_size": 16},
        train={"epochs": 1, "batch_size": 431},
    )
    train(config, tmp_path / "run")
    for name, value in weights(tmp_path / "run").items():
        if name.endswith("running_mean"):
            assert value.any() != name.startswith(("conv1", "bn1", "layer1")), name


def test_a_run_killed_before_its_first_checkpoint_starts_over(plain, tmp_path):
    (tmp_path / "checkpoints" / ".writing-x").mkdir(parents=True)
    (tmp_path / "train.toml").write_text(dump_config(tiny_config()))
    train(tiny_config(), tmp_path, resume=True)
    assert_same_run(plain[0], tmp_path)


def test_checkpoints_that_are_a_link_to_elsewhere_are_refused(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.toml").write_text(dump_config(tiny_config()))
    (tmp_path / "run" / "checkpoints").symlink_to("../precious")
    with pytest.raises(
        ValueError,
        match=r"got .*/run/checkpoints, a link to .*/precious, expected a file or folder inside",
    ):
        train(tiny_config(), tmp_path / "run", resume=True)
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_a_finished_run_is_left_alone(plain):
    out, metrics = plain
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert train(tiny_config(), out, resume=True).metrics == metrics
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def launched(config: Config, out: Path, *arguments: str) -> str:
    """Train with `accelerate launch`; returns what was printed."""
    table = out.with_suffix(".toml")
    table.write_text(dump_config(config))
    launch = [sys.executable, "-m", "accelerate.commands.launch", *arguments, "--num_machines=1"]
    train = ["-m", "sa_zoo", "train", str(table), "--out", str(out)]
    command = [*launch, "--dynamo_backend=no", *train]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # sums have the order of those here
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("asked", "warning"),
    [("", ""), ("no", "got bf16 from the launcher, but the config says no")],
)
def test_the_launcher_decides_the_precision_that_the_config_leaves_open(
    plain, tmp_path, asked, warning
):
    config = tiny_config(train={"precision": asked})
    printed = launched(
        config, tmp_path / "run", "--cpu", "--num_processes=1", "--mixed_precision=bf16"
    )
    assert warning in printed and printed.count("got bf16") == len(warning[:1])
    if asked:
        expected = plain[0]
    else:
        expected = tmp_path / "bf16"
        train(tiny_config(train={"precision": "bf16"}), expected)
    assert_same_run(tmp_path / "run", expected)
    precision = load_config(tmp_path / "run" / "train.toml").train.precision
    assert precision == load_config(expected / "train.toml").train.precision == (asked or "bf16")


def test_two_processes_follow_the_curve_of_one(tmp_path):
    table = {
        "data": {"hold_out": "position"},
        "augment": {"crop_padding": 1, "flip": True},
        "optim": SGD,
        "train": {"batch_size": 210},
    }
    train(tiny_config(**table), tmp_path / "one")
    launch = ("--config_file=configs/accelerate/ddp.yaml", "--mixed_precision=no")
    printed = launched(tiny_config(**table), tmp_path / "two", *launch)
    assert len(re.findall(r"^epoch 2/2", printed, re.M)) == 1, "one process speaks"
    metrics = [
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")
    ]
    assert [m["environment"]["processes"] for m in metrics] == [1, 2]
    assert_same_curve(tmp_path / "one", tmp_path / "two")
    # an odd number of images, each counted once
    assert metrics[1]["test"]["n"] == 359
    assert metrics[0]["test"]["loss"] == pytest.approx(metrics[1]["test"]["loss"], rel=1e-3)


def test_a_network_divided_among_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match="got FSDP, which divides the network, expected DDP"):
        train(tiny_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_accumulation_follows_the_same_curve(tmp_path):
    for parts in (1, 3):
        table = {
            "train": {"batch_size": 210, "accumulation": parts},
            "augment": {"flip": True},
            "optim": SGD,
        }
        train(tiny_config(**table), tmp_path / str(parts))
    assert_same_curve(tmp_path / "1", tmp_path / "3")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    config = tiny_config(optim={"name": "sgd", "lr": 1e30}, train={"checkpoint_steps": 1})
    said = (
        r"got (nan|inf), which is not finite, in epoch 1, step [2-6]; (.*) is the last good check"
    )
    with pytest.raises(FloatingPointError, match=said) as caught:
        train(config, tmp_path / "run")
    kept = max((tmp_path / "run" / "checkpoints").iterdir())
    assert f"; {kept} is the last good checkpoint. Lower optim.lr or set" in str(caught.value)
    assert all(value.isfinite().all() for value in load_file(kept / "state.safetensors").values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("optim", [{"lr": 1e30, "weight_decay": 1e30}, {"name": "adamw"}])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch, optim):
    """With the rate, or with a gradient that is not finite although the loss is."""

    def create_overflowing(*arguments: object) -> torch.nn.Module:
        model = create_model(*arguments)
        if optim["name"] == "adamw":  # the derivative of the square root is not finite at zero
            model.blocks[0].mlp.fc2.register_forward_hook(
                lambda module, inputs, output: (output * 0).abs().sqrt()
            )
        return model

    optim = {"name": "sgd", **optim}
    monkeypatch.setattr("sa_zoo.training.train.create_model", create_overflowing)
    said = r"weights: got some that are not finite, in epoch 1, step 1; Lower optim.lr or set"
    with pytest.raises(FloatingPointError, match=said):
        train(tiny_config(optim=optim, train={"checkpoint_steps": 1}), tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


def test_a_folder_that_is_not_empty_is_refused(plain):
    before = sorted(plain[0].iterdir())
    with pytest.raises(
        FileExistsError, match=r"which is not empty; expected a new --out, or --resume"
    ):
        train(tiny_config(), plain[0])
    assert sorted(plain[0].iterdir()) == before


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir()], ids=["no folder", "empty folder"]
)
def test_resuming_nothing_is_refused(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="expected one with a run to resume"):
        train(tiny_config(), tmp_path / "run", resume=True)


def test_resuming_with_another_config_names_what_changed(stopped):
    config = tiny_config(train={"epochs": 40}, optim={"lr": 0.5})
    with pytest.raises(ValueError, match=r"optim.lr: got 0.5, expected 0.003, as in the run in .*"):
        train(config, stopped, resume=True)


def test_resuming_on_other_data_says_what_changed(tmp_path):
    folder = image_folder(tmp_path / "D", {"cat": 23, "owl": 17})
    config = tiny_config(
        data={"name": str(folder)}, train={"epochs": 211, "batch_size": 13, "checkpoint_steps": 1}
    )
    signalled(config, tmp_path / "run", signal.SIGINT, "checkpoints/epoch-*")
    shutil.copy(folder / "cat" / "0.png", folder / "cat" / "more.png")
    with pytest.raises(ValueError, match=r"data: got 24 train images of cat, not 23, expected"):
        train(config, tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_model_is_reported(stopped, tmp_path):
    config = tiny_config(model={"args": {**TINY_VIT, "depth": 3}}, train={"epochs": 40})
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "train.toml").write_text(dump_config(config))
    with pytest.raises(
        ValueError, match=r"checkpoint: got .*, which is of another model: .*blocks.2"
    ):
        train(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"model": {"name": "test_vti"}},
            r"model.name: got test_vti, expected a timm name \(did you mean test_vit\?",
        ),
        (
            {"model": {"args": {"deepth": 3}}},
            r"model.args: got arguments that test_vit cannot be built with: .*deepth",
        ),
        (
            {"model": {"args": TINY_VIT | {"global_pool": ""}}},
            r"model.args: got a model whose output for an image is \(1, 17, 10\), expected \(1, 10\)",
        ),
        ({"model": {"freeze": "^nothing"}}, r"model.freeze: got '\^nothing', which matches 0 of"),
        (
            {"model": {"freeze": "."}},
            r"model.freeze: got '.', which matches (\d+) of \1 parameters",
        ),
        (
            {"model": {"init": "test_resnet"}},
            r"model.init: got weights of test_resnet in test_resnet, expected test_v",
        ),
        (
            {"optim": {"name": "adamm"}},
            r"optim.name: got adamm, expected a timm optimizer \(did you mean adam",
        ),
        (
            {"optim": {"args": {"adjust_lr": 1}}},
            r"optim.args: got {'adjust_lr': 1}, which timm's adamw does not",
        ),
        (
            {"optim": {"args": {"lr": 1}}},
            r"optim.args: got {'lr': 1}, which .*multiple values .*'lr'",
        ),
        (
            {"augment": {"small_epochs": 1}},
            r"augment.small_epochs: got 1, expected 0: test_vit takes images of one siz",
        ),
        (
            {"model": {"name": "sa_quadratic_tiny_cifar", "args": {}}, "data": {"image_size": 15}},
            r"image_size: got 15x15: im",
        ),
        (
            {"train": {"batch_size": 1310}},
            r"train.batch_size: got 1310, expected at most the 1309 to train on",
        ),
        (
            {"train": {"batch_size": 211, "accumulation": 3}},
            r"train.batch_size: got 211, expected a multiple of 1 processes x 3 micro-batches",
        ),
        (
            {"augment": {"mixup": 0.2}},
            r"train.batch_size: got 211, expected an even number per micro-batch for mixup and cutmix, not 211",
        ),
        (
            {"train": {"precision": "fp16"}},
            r"train.precision: got fp16, expected bf16 or no on a CPU",
        ),
    ],
)
def test_what_a_run_cannot_do_is_reported_before_it_makes_a_folder(
    tmp_path, monkeypatch, sections, said
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        train(tiny_config(**sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_without_test_images_are_reported_before_it_makes_a_folder(tmp_path):
    folder = image_folder(tmp_path / "data", {"cat": 1, "dog": 1})
    with pytest.raises(
        ValueError, match=r"data.name: got data without test images, expected a test split"
    ):
        train(tiny_config(data={"name": str(folder)}, train={"batch_size": 1}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_initial_weights_that_are_not_there_are_reported(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"got none from local-dir:.*nowhere, which lacks config.json"
    ):
        train(tiny_config(model={"init": f"local-dir:{tmp_path}/nowhere"}), tmp_path / "run")


def test_a_model_without_weights_says_so_when_a_run_starts_from_it(tmp_path):
    name = "sa_eq8_tiny_cifar"
    with pytest.raises(
        FileNotFoundError,
        match=f"model.init: got {name}, expected a folder, .* or a timm name with w",
    ):
        train(tiny_config(model={"name": name, "args": {}, "init": name}), tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        ({"name": "test_vti"}, ValueError, "model.name: got test_vti"),
        (
            {"init": "local-dir:nowhere"},
            FileNotFoundError,
            "weights: got none from local-dir:nowhere",
        ),
        ({"init": "test_vti"}, FileNotFoundError, "model.init: got test_vti"),
    ],
)
def test_a_model_that_is_not_there_is_reported_before_data_are_loaded(tmp_path, model, error, said):
    """Loading data may take hours; here it fails at once."""
    config = tiny_config(model=model, data={"name": str(tmp_path / "no" / "data")})
    with pytest.raises(error, match=said):
        train(config, tmp_path / "run")


def test_fine_tuning_starts_from_a_run_with_a_new_head(plain, tmp_path):
    folder = parquet_folder(
        tmp_path / "three", {"train": noise_images(30), "test": noise_images(7, seed=1)}
    )
    args = {"init": f"local-dir:{plain[0]}", "freeze": r"^(?!head|norm)"}
    table = {
        "model": args,
        "data": {"name": str(folder), "validation": 0.2},
        "optim": {"layer_decay": 0.7},
        "train": {"batch_size": 8},
    }
    torch.manual_seed(0)
    train(tiny_config(**table), tmp_path / "run")
    before, after = weights(plain[0]), weights(tmp_path / "run")
    assert after["head.weight"].shape == (3, before["head.weight"].shape[1])
    for key, value in before.items():
        if not key.startswith("head"):
            assert torch.equal(value, after[key]) is not key.startswith("norm."), key


def test_the_recipe_for_a_folder_of_images_runs_where_nothing_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "images", {"cat": 13, "dog": 7})
    settings = [
        "data.name=images",
        "train.epochs=1",
        "train.batch_size=5",
        "model.freeze=^(?!head)",
    ]
    train(load_config("finetune_folder", settings), tmp_path / "run")
    packaged = timm.create_model("sa_quadratic_tiny_cifar", pretrained=True).state_dict()
    tuned = weights(tmp_path / "run")
    assert tuned["head.weight"].shape == (2, packaged["head.weight"].shape[1])
    del packaged["head.weight"], packaged["head.bias"]
    for key, value in packaged.items():
        assert torch.equal(value, tuned[key]), key


def test_fine_tuning_can_change_the_image_size(plain):
    config = tiny_config(model={"init": f"local-dir:{plain[0]}", "args": {"img_size": 12}}).model
    model = create_model(config, 10)
    assert model.pos_embed.shape[1] == 37  # 36 patches and the class token
    assert model(torch.zeros(1, 3, 12, 12)).shape == (1, 10)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, weights(plain[0])["blocks.1.mlp.fc1.weight"])


def test_decay_spares_biases_norms_shifts_and_spreads():
    model = timm.create_model("sa_quadratic_tiny_cifar", depth=2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spared, decayed = [], []
    for group in optimizer_of(model, OptimConfig(weight_decay=0.05)).param_groups:
        (decayed if group["weight_decay"] else spared).extend(names[id(p)] for p in group["params"])
    assert sorted(spared + decayed) == sorted(names.values())
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert {name.rpartition(".")[2] for name in spared} >= {"Delta", "spread", "bias"}


def test_layer_decay_gives_lower_layers_lower_rates():
    model = timm.create_model("sa_quadratic_tiny_cifar", depth=2)
    groups = optimizer_of(model, OptimConfig(layer_decay=0.5)).param_groups
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    stem, first, second, head = (
        scale[id(model.get_parameter(name))]
        for name in (
            "patch_embed.weight",
            "blocks.0.fc1.weight",
            "blocks.1.fc1.weight",
            "head.weight",
        )
    )
    assert stem < first < second < head == 1.0
    assert second == 2 * first


def test_the_weight_average_is_what_is_published_and_does_not_change_training(plain, tmp_path):
    metrics = train(tiny_config(train={"ema": 0.9}), tmp_path / "run").metrics
    averaged, plainly = history(tmp_path / "run"), history(plain[0])
    assert [line["loss"] for line in averaged] == [line["loss"] for line in plainly]
    assert averaged[-1]["validation"] != plainly[-1]["validation"]
    assert metrics.validation.loss == pytest.approx(averaged[-1]["validation"]["loss"], rel=1e-5)


def test_bf16_trains_on_a_cpu_and_publishes_full_precision(plain, tmp_path):
    train(tiny_config(train={"precision": "bf16"}), tmp_path / "run")
    rough, fine = history(tmp_path / "run"), history(plain[0])
    assert rough[-1]["loss"] == pytest.approx(fine[-1]["loss"], rel=0.05)
    assert rough[-1]["loss"] != fine[-1]["loss"]
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "run").values())


def test_nothing_held_out_is_nothing_reported(tmp_path):
    config = tiny_config(data={"validation": 0.0}, train={"epochs": 1})
    metrics = train(config, tmp_path / "run").metrics
    assert metrics.validation is None
    assert "validation" not in json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert "validation" not in history(tmp_path / "run")[0]
    assert metrics.train.n == 1443


def test_tensorboard_follows_where_it_is_asked_for(tmp_path):
    args = {
        **TINY_VIT,
        "img_size": [8, 8],
    }  # a list, which TensorBoard does not take as a hyperparameter
    train(
        tiny_config(model={"args": args}, train={"tracker": "tensorboard", "epochs": 1}),
        tmp_path / "run",
    )
    (events,) = (tmp_path / "run" / "tensorboard").glob("events.*")
    assert b"validation/top1" in events.read_bytes()


def test_a_dying_process_that_decodes_images_is_reported_and_the_run_resumes(tmp_path, monkeypatch):
    read, training = StreamedSplit.read, {"killed": True}
    folder = parquet_folder(
        tmp_path / "data", {"train": noise_images(60), "test": noise_images(7, seed=1)}
    )
    table = {
        "data": {"name": str(folder), "validation": 0.2},
        "train": {"batch_size": 8, "checkpoint_steps": 1},
    }

    def killed(self: StreamedSplit, row: int) -> torch.Tensor:
        if training["killed"] and row == 30 and get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, row)

    monkeypatch.setattr("sa_zoo.training.splits.KEPT_BYTES", 0)
    monkeypatch.setattr(StreamedSplit, "read", killed)
    with pytest.raises(
        ConnectionError,
        match=r"a process that decodes images has ended: .*--resume .*DataLoader worker",
    ):
        train(tiny_config(**table), tmp_path / "run")
    training["killed"] = False
    train(tiny_config(**table), tmp_path / "run", resume=True)
    train(tiny_config(**table), tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_connection_that_breaks_before_its_process_has_ended_is_reported_alike():
    batches = iter(DataLoader(torch.arange(7), num_workers=1))
    with (
        pytest.raises(ConnectionError, match=r"a process that decodes images has ended: .*Killed"),
        report_lost_process(),
    ):
        batches._workers[0].kill()
        raise ConnectionResetError("by a process that the system has not reported yet")
    with pytest.raises(ConnectionResetError, match="by something else"), report_lost_process():
        raise ConnectionResetError("by something else")


def test_a_run_on_streamed_images_resumes_with_its_dropout(tmp_path, monkeypatch):
    monkeypatch.setattr("sa_zoo.training.splits.KEPT_BYTES", 0)
    train_section = {"epochs": 1, "checkpoint_steps": 1}
    config = tiny_config(model={"args": {**TINY_VIT, "drop_rate": 0.1}}, train=train_section)
    train(config, tmp_path / "whole")
    signalled(config, tmp_path / "run", signal.SIGINT, "checkpoints/epoch-00000-step-*")
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_without_a_terminal_each_epoch_is_a_line(tmp_path, capsys):
    train(tiny_config(), tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    wanted = (
        r"epoch 2/2: loss \d\.\d+, accuracy 0\.\d+, validation 0\.\d+, \d+ images/s, 00:00 left"
    )
    assert re.fullmatch(wanted, lines[1])


def test_images_streamed_from_disk_train_to_the_same_weights(tmp_path, monkeypatch):
    images = {"train": noise_images(40), "test": noise_images(7, seed=1)}
    table = {
        "data": {"name": str(parquet_folder(tmp_path / "data", images)), "validation": 0.2},
        "augment": {"crop_padding": 1, "flip": True},
        "train": {"batch_size": 8},
    }
    train(tiny_config(**table), tmp_path / "kept")
    monkeypatch.setattr("sa_zoo.training.splits.KEPT_BYTES", 0)
    train(tiny_config(**table), tmp_path / "streamed")
    assert_same_run(tmp_path / "kept", tmp_path / "streamed")
