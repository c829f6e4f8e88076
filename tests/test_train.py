import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tiny_runs import (
    MUON,
    TINY_VIT,
    free_port,
    image_folder,
    noise_images,
    parquet_folder,
    signalled_by,
    tiny_config,
)
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import sa_zoo
from sa_zoo.cost import training_macs
from sa_zoo.data.hold_out import drawn_for, rows_of
from sa_zoo.data.images import Images
from sa_zoo.data.input_format import input_format_of
from sa_zoo.data.open_images import open_images
from sa_zoo.data.splits import STOPS, splits_of
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.opened import open_model
from sa_zoo.training.augment import ORDER, permutation
from sa_zoo.training.config import Config, ModelConfig, OptimConfig, dump_config, load_config
from sa_zoo.training.device import SHARED, process_as_found, report_lost_process
from sa_zoo.training.loop import Run
from sa_zoo.training.model import create_model
from sa_zoo.training.optimization import learning_rate_factor, optimizer_of
from sa_zoo.training.progress import Interrupted
from sa_zoo.training.train import train

ROOT = Path(__file__).parents[1]
# runs with everything that draws random numbers or keeps a state of its own
RUNS = {
    "random": {
        "model": {"args": {**TINY_VIT, "drop_rate": 0.1, "proj_drop_rate": 0.1}},
        "augment": {"crop_padding": 1, "flip": True, "mixup": 0.3, "label_smoothing": 0.1},
        "optim": {"name": "adamw", "clip": 1.0},
        "train": {"epochs": 4, "batch_size": 106, "checkpoint_steps": 5},
    },
    "muon": {**MUON, "augment": {"small_epochs": 2}},
    "batch norm": {
        "model": {"name": "test_resnet", "args": {}, "freeze": "^(conv1|bn1|layer1)"},
        "data": {"image_size": 16},
        "optim": {"name": "sgd", "lr": 0.01},
        "train": {"epochs": 2, "batch_size": 431},
    },
}


def history(out: Path) -> list[dict]:
    """The lines of history.jsonl without their times."""
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit."""
    assert history(a) == history(b)
    assert read_metrics(a).test == read_metrics(b).test
    weights_of = [{p.name: p.read_bytes() for p in run.glob("*.safetensors")} for run in (a, b)]
    assert weights_of[0] == weights_of[1]


def assert_same_curve(a: Path, b: Path) -> None:
    """To rounding."""
    for one, two in zip(history(a), history(b), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
        assert one["top1"] == pytest.approx(two["top1"], abs=0.002)
        assert one["validation"]["loss"] == pytest.approx(two["validation"]["loss"], rel=1e-3)
        assert one["validation"]["n"] == two["validation"]["n"]


def interrupted(config: Config, out: Path, number: int, once: str) -> None:
    """A run that is stopped by a signal as soon as a file of that pattern is in its folder."""
    stopped = rf"stopped in epoch \d+ after step \d+ of \d+, and saved in {out}"
    with signalled_by(number, out, once), pytest.raises(Interrupted, match=stopped):
        train(config, out)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run and its metrics."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return out, train(tiny_config(), out).metrics


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """A config of RUNS and its run, not interrupted."""
    config = tiny_config(**RUNS[request.param])
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config, out)
    return config, out


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_linearly_and_falls_as_scheduled(schedule):
    optim = OptimConfig(warmup=0.1, schedule=schedule)
    rates = [learning_rate_factor(seen, 10, 1000, optim) for seen in range(0, 1000, 10)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    left = np.arange(90, 0, -1) / 90
    falls = left if schedule == "linear" else (1 - np.cos(np.pi * left)) / 2
    assert rates[10:] == pytest.approx(falls)


def test_a_run_learns_and_reports_what_it_left_behind(plain):
    out, metrics = plain
    files = {"model.safetensors", "config.json", "train.toml", "metrics.json", "history.jsonl"}
    assert {path.name for path in out.iterdir()} == files
    assert load_config(out / "train.toml") == tiny_config()
    assert read_metrics(out) == metrics
    assert (metrics.model, metrics.data, metrics.test.n) == ("test_vit", "digits", 354)
    assert min(metrics.train.seconds, metrics.train.cpu_seconds) > 0
    assert metrics.train.images_per_second > 0
    lines = history(out)
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[1]["loss"] < lines[0]["loss"] < 2.5
    # the last epoch is the one that counts
    assert metrics.validation.top1 == lines[-1]["validation"]["top1"]
    assert metrics.validation.loss == pytest.approx(lines[-1]["validation"]["loss"], rel=1e-5)


def test_a_run_killed_before_its_first_checkpoint_starts_over(plain, tmp_path):
    (tmp_path / "checkpoints" / ".writing-x").mkdir(parents=True)
    (tmp_path / "train.toml").write_text(dump_config(tiny_config()))
    train(tiny_config(), tmp_path, resume=True)
    assert_same_run(plain[0], tmp_path)


@pytest.mark.parametrize(
    ("whole", "number", "kept_bytes"),
    [
        ("random", signal.SIGHUP, 2**31),
        ("muon", signal.SIGUSR1, 0),  # streamed
        ("batch norm", signal.SIGTERM, 2**31),
    ],
    indirect=["whole"],
)
def test_an_interrupted_run_resumes_to_the_same_bits(
    whole, tmp_path, monkeypatch, number, kept_bytes
):
    config, out = whole
    monkeypatch.setattr("sa_zoo.data.splits.KEPT_BYTES", kept_bytes)
    handler = signal.getsignal(number)
    interrupted(config, tmp_path / "run", number, "checkpoints/epoch-00001-*")
    assert signal.getsignal(number) == handler
    train(config, tmp_path / "run", resume=True)
    assert_same_run(out, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("whole", ["muon"], indirect=True)
def test_early_epochs_count_as_the_work_of_their_images(whole):
    model = timm.create_model("sa_quadratic_tiny_cifar", num_classes=10, **MUON["model"]["args"])
    small, full = (training_macs(model, (3, size, size)) for size in (6, 8))
    # a multiply-add is 2 operations, a backward pass costs two forward passes; 6 steps an epoch
    pflop = 2 * 3 * (2 * small + full) * 6 * 211 / 1e15
    assert read_metrics(whole[1]).train.pflop == pytest.approx(pflop)


@pytest.mark.parametrize("whole", ["batch norm"], indirect=True)
def test_frozen_layers_keep_their_running_statistics(whole):
    for name, value in weights(whole[1]).items():
        if name.endswith("running_mean"):
            assert value.any() != name.startswith(("conv1", "bn1", "layer1")), name


def test_two_machines_follow_the_curve_of_one_process(tmp_path):
    """As `accelerate launch` starts them, with another precision than that of the config.

    The machines have different folders, and resume a run that is on the first one.
    """
    one, two = tmp_path / "one", tmp_path / "0" / "run"
    config = tiny_config(
        augment={"crop_padding": 1, "flip": True},
        optim={"name": "sgd", "lr": 0.05},  # unlike Adam, it notices gradients of a wrong size
        train={"batch_size": 210},
    )
    train(config, one)
    interrupted(config, two, signal.SIGINT, "checkpoints/epoch-*")
    (tmp_path / "run.toml").write_text(dump_config(config))
    # sums have the order of as many threads as here
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    port = free_port()
    started = []
    for rank in "01":
        (tmp_path / rank).mkdir(exist_ok=True)
        command = f"""{sys.executable} -m accelerate.commands.launch --machine_rank={rank}
            --config_file={ROOT}/configs/accelerate/ddp.yaml --mixed_precision=bf16
            --dynamo_backend=no --num_machines=2 --main_process_ip=127.0.0.1
            --main_process_port={port} -m sa_zoo train ../run.toml --out run --resume"""
        process = subprocess.Popen(
            command.split(),
            cwd=tmp_path / rank,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
    said = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "got bf16 from the launcher, but the config says no" in said[0][1]
    epoch = r"^epoch 2/2: loss \d\.\d+, accuracy 0\.\d+, validation 0\.\d+, \d+ images/s, .* left$"
    printed = "".join(output for output, _ in said)
    assert len(re.findall(epoch, printed, re.M)) == 1, "one process speaks"
    assert not any((tmp_path / "1").iterdir()), "only the main process has a folder"
    assert_same_curve(one, two)
    metrics = read_metrics(one), read_metrics(two)
    assert [each.environment["processes"] for each in metrics] == [1, 2]
    assert metrics[1].test.n == 354, "each counted once"
    assert metrics[0].test.loss == pytest.approx(metrics[1].test.loss, rel=1e-3)
    assert sa_zoo.evaluate(two).test.loss == pytest.approx(metrics[1].test.loss, rel=1e-5)


def test_steps_are_those_of_plain_sgd(tmp_path):
    """With each batch in three parts, and in a loop over whole batches."""
    optim = {"name": "momentum", "lr": 0.05, "weight_decay": 0.0, "clip": 0.5}
    parts = {"epochs": 1, "batch_size": 210, "accumulation": 3}
    config = tiny_config(optim=optim, train=parts, data={"validation": 0.0})
    metrics = train(config, tmp_path / "run").metrics
    assert metrics.validation is None and metrics.train.n == 1443
    torch.manual_seed(0)
    model = create_model(config.model, 10)
    input_format = input_format_of(model)
    source = open_images(config.data)
    splits = splits_of(source, rows_of(source, 0.0), input_format, torch.device("cpu"))
    data = splits["train"]
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step, rows in enumerate(permutation(len(data), ORDER, 0, 0)[:1260].reshape(6, 210)):
        images, labels, _ = data.__getitems__(rows)
        optimizer.zero_grad()
        cross_entropy(model(input_format.normalize(images)), labels).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.05 * learning_rate_factor(step, 1, 6, OptimConfig())
        optimizer.step()
    for name, trained in weights(tmp_path / "run").items():
        assert torch.allclose(trained, model.state_dict()[name], atol=1e-5), name


def test_a_compiled_run_follows_the_same_curve(plain, tmp_path, monkeypatch):
    """As `accelerate launch --dynamo_backend ...` asks for; this backend traces all and builds no kernels."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")  # as the launcher does
    compiled, original = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: compiled.append(how) or original(model, **how)
    )
    train(tiny_config(), tmp_path / "run")
    assert [(how["backend"], how["dynamic"]) for how in compiled] == [("aot_eager", False)]
    assert_same_curve(plain[0], tmp_path / "run")
    assert weights(plain[0]).keys() == weights(tmp_path / "run").keys()


def test_the_launcher_decides_a_precision_left_open(plain, tmp_path, monkeypatch):
    """bfloat16 trains on a CPU, and full precision is published. TensorBoard follows."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = {**TINY_VIT, "img_size": [8, 8]}  # a list, which TensorBoard does not take
    config = tiny_config(model={"args": args}, train={"precision": "", "tracker": "tensorboard"})
    train(config, tmp_path / "run")
    (events,) = (tmp_path / "run" / "tensorboard").glob("events.*")
    assert b"validation/top1" in events.read_bytes()
    assert load_config(tmp_path / "run" / "train.toml").train.precision == "bf16"
    rough, fine = history(tmp_path / "run"), history(plain[0])
    assert rough[-1]["loss"] == pytest.approx(fine[-1]["loss"], rel=0.05)
    assert rough[-1]["loss"] != fine[-1]["loss"]
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "run").values())


def test_a_network_divided_among_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="got FSDP, which divides the network, expected DDP"):
        train(tiny_config(), tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_and_keeps_a_checkpoint(tmp_path):
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


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """A gradient may be infinite although the loss is not: that of the square root at zero."""

    def create_overflowing(*arguments: object) -> torch.nn.Module:
        model = create_model(*arguments)
        model.blocks[0].mlp.fc2.register_forward_hook(
            lambda module, inputs, output: (output * 0).abs().sqrt()
        )
        return model

    monkeypatch.setattr("sa_zoo.training.model.create_model", create_overflowing)
    said = r"weights: got some that are not finite, in epoch 1, step 1; Lower optim.lr or set"
    with pytest.raises(FloatingPointError, match=said):
        train(tiny_config(train={"checkpoint_steps": 1}), tmp_path / "run")
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


def test_a_folder_that_is_not_empty_is_refused(plain):
    before = sorted(plain[0].iterdir())
    with pytest.raises(FileExistsError, match="not empty; expected a new --out, or --resume"):
        train(tiny_config(), plain[0])
    assert sorted(plain[0].iterdir()) == before


def test_checkpoints_that_are_a_link_to_elsewhere_are_refused(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.toml").write_text(dump_config(tiny_config()))
    (tmp_path / "run" / "checkpoints").symlink_to("../precious")
    with pytest.raises(ValueError, match=r"run/checkpoints, a link to .*/precious, expected"):
        train(tiny_config(), tmp_path / "run", resume=True)
    assert not any((tmp_path / "precious").iterdir())


def test_resuming_with_another_config_names_what_changed(plain):
    with pytest.raises(ValueError, match=r"optim.lr: got 0.5, expected 0.003, as in the run in .*"):
        train(tiny_config(optim={"lr": 0.5}), plain[0], resume=True)


def test_a_run_resumes_with_the_same_data_at_another_place_only(plain, tmp_path):
    """Its initial weights may be gone; the card still names the weights that those were made of."""
    folder = image_folder(tmp_path / "D", {"cat": 23, "owl": 17})
    init = shutil.copytree(plain[0], tmp_path / "init")
    (init / "metrics.json").write_text('{"base_model": "somebody/cnn"}')

    def config(place: Path) -> Config:
        steps = {"epochs": 67, "batch_size": 13, "checkpoint_steps": 1}
        data = {"name": str(place), "workers": 0}
        return tiny_config(model={"init": str(init)}, data=data, train=steps)

    interrupted(config(folder), tmp_path / "run", signal.SIGINT, "checkpoints/epoch-*")
    moved = folder.rename(tmp_path / "E")
    shutil.copy(moved / "cat" / "0.png", moved / "cat" / "more.png")
    with pytest.raises(ValueError, match=r"data: got 24 train images of cat, not 23"):
        train(config(moved), tmp_path / "run", resume=True)
    (moved / "cat" / "more.png").unlink()
    shutil.rmtree(init)
    run = train(config(moved), tmp_path / "run", resume=True)
    assert run.metrics.base_model == "somebody/cnn"
    assert load_config(tmp_path / "run" / "train.toml").data.name == str(moved)


def test_two_processes_do_not_share_a_folder(tmp_path):
    (tmp_path / "train.toml").write_text(dump_config(tiny_config()))
    # flock tells two openings apart, as it does two processes
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="in which another process trains"):
        train(tiny_config(), tmp_path, resume=True)
    os.close(folder)


def test_the_process_is_left_as_it_was_found(tmp_path, monkeypatch):
    """With a loop of the caller's on accelerate, and without a terminal."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)

    def state() -> tuple:
        numbers = (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        )
        return numbers, [{**each._shared_state} for each in SHARED], [*map(signal.getsignal, STOPS)]

    with process_as_found():
        mine = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
        before = state()
        run = train(tiny_config(), tmp_path / "run")
        sa_zoo.evaluate(run.folder)
        assert (mine.gradient_accumulation_steps, mine.mixed_precision) == (4, "bf16")
        assert state() == before


SA = {"name": "sa_quadratic_tiny_cifar", "args": {}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"args": {"deepth": 3}}}, "model.args: got test_vit, .*deepth"),
        (
            {"model": {"args": TINY_VIT | {"global_pool": ""}}},
            r"model whose output for an image is \(1, 17, 10\), expected \(1, 10\)",
        ),
        ({"model": {"freeze": "."}}, r"freeze: got '.', which matches (\d+) of \1 parameters"),
        ({"model": {"init": "test_resnet"}}, "init: got weights of test_resnet .* expected test_v"),
        (
            {"optim": {"args": {"adjust_lr": 1}}},
            "got {'adjust_lr': 1}, which timm's adamw does not",
        ),
        ({"train": {"batch_size": 1310}}, "got 1310, expected at most the 1309 to train on"),
        ({"train": {"accumulation": 3}}, "got 211, expected a multiple of 1 processes x 3 micro-"),
        ({"train": {"precision": "fp16"}}, "got fp16, expected bf16 or no on a CPU"),
        (
            {"data": {"name": "D"}, "train": {"batch_size": 2}},
            "got D without test images, expected a test split",
        ),
        ({"model": {"init": "local-dir:no"}}, "got none from .*lacks config.json"),
        ({"model": {"init": "sa_eq8_cifar"}}, "expected .* a timm name with weights"),
        ({"model": {"kernels": 1}}, "got 1 for test_vit, expected at most its number of blocks"),
        ({"model": SA | {"kernels": 7}}, "got 7 for sa_quadratic_tiny_cifar, expected at most"),
        ({"model": {"name": "sa_eq8_cifar", "args": {}, "kernels": 1}}, "got 1 for sa_eq8_cifar"),
        (
            {"augment": {"scale": [0.3, 1.0], "flip": True}},
            r"augment.flip: got True with augment.scale = \[0.3",
        ),
        (
            {"augment": {"scale": [0.3, 1.0], "auto_augment": "rnd"}},
            "augment.auto_augment: got 'rnd', expected",
        ),
        (
            {
                "model": {"name": "test_vti"},
                "data": {"name": "/no/data"},
                "optim": {"name": "adamm"},
                "augment": {"mixup": 0.2},
                "train": {"tracker": "tensorbord"},
            },
            r"is not installed(?s:.*)got test_vti, .* \(did you mean test_vit\?(?s:.*)got adamm,"
            r"(?s:.*)got 211, expected an even number(?s:.*)data\.name: got",
        ),
        (
            {"data": {"validation": 0.0}, "train": {"keep": "best"}},
            "keep: got best without validation images, expected",
        ),
        (
            {"model": SA, "data": {"image_size": 20}, "augment": {"small_epochs": 1}},
            "data.image_size, augment.small_epochs, .*: got images of 15x15: im",
        ),
    ],
)
def test_a_run_that_cannot_work_leaves_no_folder(tmp_path, monkeypatch, sections, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "D", {"cat": 1, "dog": 1})
    with pytest.raises((ValueError, OSError), match=said):
        train(tiny_config(**sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fine_tuning_starts_from_a_run_with_a_new_head_and_size(plain, tmp_path):
    folder = parquet_folder(
        tmp_path / "three", {"train": noise_images(30), "test": noise_images(7, seed=1)}
    )
    config = tiny_config(
        model={
            "init": f"local-dir:{plain[0]}",
            "freeze": r"^(?!head|norm)",
            "args": {"img_size": 12},
        },
        data={"name": str(folder), "validation": 0.2},
        optim={"layer_decay": 0.7},
        train={"batch_size": 8},
    )
    train(config, tmp_path / "run")
    before, after = weights(plain[0]), weights(tmp_path / "run")
    assert after["head.weight"].shape == (3, 16) and after["pos_embed"].shape == (1, 37, 16)
    for key, value in before.items():
        if not key.startswith(("head", "pos_embed")):
            assert torch.equal(value, after[key]) is not key.startswith("norm."), key


@pytest.mark.parametrize("init", ["", "sa_plain_tiny_cifar"])
def test_heads_on_one_pixel_stay_there(init):
    model = create_model(ModelConfig(name="sa_plain_tiny_cifar", init=init), 3)
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    positions = {name for name, _ in model.named_parameters() if re.search("Delta|spread", name)}
    assert fixed == (positions if init else set())
    # a new classifier on trained layers starts at zero
    assert model.head.weight.any() != bool(init)


@pytest.mark.parametrize("name", ["mhsa_resnet_tiny_cifar", "mhsa_network"])
def test_the_weights_of_a_cnn_start_its_twin_of_attention(name):
    cnn = f"local-dir:{ROOT}/model_cards/resnet_tiny_cifar"
    args = {"layers": "layer4.*", "alpha": 2.0}
    which = {"cnn": "resnet_tiny_cifar"} if name == "mhsa_network" else {}
    twin = create_model(ModelConfig(name=name, init=cnn, args=args | which), 10)
    converted, _ = sa_zoo.convert(open_model(cnn).network, **args)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(twin.eval()(images), converted(images), rtol=1e-5, atol=1e-5)
    assert twin.pretrained_cfg["architecture"] == name


def test_only_weights_decay_and_lower_layers_have_lower_rates():
    model = timm.create_model("sa_quadratic_tiny_cifar", depth=2)
    optim = OptimConfig(weight_decay=0.05, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, scale = set(), {}
    for group in optimizer_of(model, optim).param_groups:
        grouped = {names.pop(id(parameter)) for parameter in group["params"]}
        scale |= dict.fromkeys(grouped, group["lr_scale"])
        decayed |= grouped if group["weight_decay"] else set()
    assert not names
    assert decayed == {name for name in scale if re.search(r"(?<!norm\d)\.weight$", name)}
    layers = ("patch_embed", "blocks.0.fc1", "blocks.1.fc1", "head")
    rates = [scale[f"{layer}.weight"] for layer in layers]
    assert sorted(rates) == rates and rates[2:] == [2 * rates[1], 1.0]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_set_too_large_to_keep_is_checked_by_its_first_epoch(tmp_path, monkeypatch, split):
    """Nothing is read before; a run stopped by an unusable image ends as if that had not happened."""
    for module in ("splits", "report"):
        monkeypatch.setattr(f"sa_zoo.data.{module}.MANY", 0)
    monkeypatch.setattr("sa_zoo.data.splits.KEPT_BYTES", 0)
    monkeypatch.setattr(Images, "content", None)
    folder = image_folder(tmp_path / "D", {"cat": 53, "owl": 47})
    steps = {"epochs": 2, "batch_size": 13, "checkpoint_steps": 100}
    config = tiny_config(data={"name": str(folder), "workers": 1}, train=steps)
    train(config, tmp_path / "whole")
    assert read_metrics(tmp_path / "whole").held_out.by == "name"
    data = drawn_for(open_images(config.data), kept=False)
    images = data.images["train"]
    broken = Path(images.path(rows_of(data, 0.1)[split][1][-1]))
    content = broken.read_bytes()
    broken.write_bytes(b"no image")
    with pytest.raises(ValueError, match=f"{broken}, image .*replace the image, then --resume"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "history.jsonl").exists()
    broken.write_bytes(content)
    train(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


# torch's handler of signals can interrupt whatever runs, such as a callback of the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dying_process_that_decodes_images_is_reported(tmp_path, monkeypatch):
    step = Run.step

    def step_without_workers(run: Run, batches: list) -> None:
        for process in multiprocessing.active_children():
            process.kill()
        step(run, batches)

    monkeypatch.setattr("sa_zoo.data.splits.KEPT_BYTES", 0)
    monkeypatch.setattr(Run, "step", step_without_workers)
    config = tiny_config(data={"workers": 1}, train={"batch_size": 7, "checkpoint_steps": 1})
    ended = r"a process that decodes images has ended: .*--resume .*DataLoader worker"
    with pytest.raises(ConnectionError, match=ended):
        train(config, tmp_path / "run")


def test_a_connection_lost_before_its_process_ends_is_reported():
    batches = iter(DataLoader(torch.arange(7), num_workers=1, multiprocessing_context="fork"))
    with (
        pytest.raises(ConnectionError, match=r"a process that decodes images has ended: .*Killed"),
        report_lost_process(),
    ):
        batches._workers[0].kill()
        raise ConnectionResetError("by a process that the system has not reported yet")
    with pytest.raises(ConnectionResetError, match="by something else"), report_lost_process():
        raise ConnectionResetError("by something else")


def test_one_image_is_too_few_for_batch_normalization(tmp_path):
    config = tiny_config(
        model={"name": "test_resnet", "args": {}},
        data={"image_size": 16},
        train={"batch_size": 7, "accumulation": 7},
    )
    with pytest.raises(ValueError, match=r"train.batch_size: got 7, in micro-batches of one image"):
        train(config, tmp_path / "run")
