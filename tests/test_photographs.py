"""Photographs: random crops by timm decoded by workers, the classifier first, and the best epoch."""

import itertools
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image
from timm.data import create_transform
from tiny_runs import image_folder, signalled_by, tiny_config

from sa_zoo.commands.finish import finish
from sa_zoo.cost import training_macs
from sa_zoo.data.config import DataConfig
from sa_zoo.data.hold_out import rows_of
from sa_zoo.data.input_format import InputFormat, input_format_of
from sa_zoo.data.open_images import open_images
from sa_zoo.data.splits import STOPS, splits_of
from sa_zoo.folders.metrics import Scores
from sa_zoo.training.augment import Augment, seed_view
from sa_zoo.training.config import AugmentConfig, Config, ModelConfig
from sa_zoo.training.model import create_model
from sa_zoo.training.photographs import Photographs
from sa_zoo.training.progress import Interrupted
from sa_zoo.training.run_folder import BEST
from sa_zoo.training.train import train

CPU = torch.device("cpu")
EVERY_KEY = {
    "scale": [0.3, 1.0],
    "ratio": [0.7, 1.4],
    "hflip": 0.4,
    "color_jitter": 0.3,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "re_prob": 0.6,
    "interpolation": "random",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made photographs of two classes and two sizes, 37 to train on and 13 each to validate and to test on."""
    folder = tmp_path_factory.mktemp("photographs")
    image_folder(folder, {"train/cat": 18, "val/cat": 6, "test/cat": 6}, (83, 71))
    return image_folder(folder, {"train/owl": 19, "val/owl": 7, "test/owl": 7}, (61, 97))


def config_of(folder: Path, **sections: dict) -> Config:
    data = {"name": str(folder), "image_size": 64, **sections.pop("data", {})}
    model = {"name": "test_resnet", "args": {}}
    sections["train"] = {"batch_size": 6, **sections.get("train", {})}
    return tiny_config(model=model, data=data, **sections)


def test_a_resumed_run_with_workers_has_the_weights_of_one_without(folder, tmp_path):
    def config(workers: int) -> Config:
        return config_of(folder, data={"workers": workers}, augment={**EVERY_KEY, "mixup": 0.2})

    train(config(0), tmp_path / "whole")
    once = "checkpoints/epoch-00001-*"
    resumed = tmp_path / "resumed"
    with signalled_by(signal.SIGUSR1, resumed, once), pytest.raises(Interrupted):
        train(config(2), resumed)
    train(config(2), resumed, resume=True)
    same = [(path / "model.safetensors").read_bytes() for path in tmp_path.iterdir()]
    assert len(same) == 2 and same[0] == same[1]


@pytest.fixture
def split(folder):
    """The training images, read by two workers."""
    data = open_images(DataConfig(name=str(folder)))
    form = InputFormat((3, 64, 64), (0.5, 0.4, 0.3), (0.2,) * 3, "bicubic", 0.9)
    return splits_of(data, rows_of(data, 0.1), form, CPU, 2, never_kept={"train"})["train"]


def test_a_training_image_is_timms_for_its_seed_epoch_and_row(split):
    form, source = split.input_format, split.source
    split = Photographs(split, AugmentConfig.model_validate(EVERY_KEY), seed=5)
    split.epoch = 3
    before = torch.get_rng_state()
    images, labels, indices = split.__getitems__([31, 2])
    assert torch.equal(torch.get_rng_state(), before)
    loaded = next(iter(split.loader(batch_sampler=[[31, 2]])))
    assert (loaded[0] == images).all() and indices.tolist() == [31, 2] and labels.tolist() == [1, 0]
    settings = {**EVERY_KEY, "input_size": form.input_size, "mean": form.mean, "std": form.std}
    transform = create_transform(**settings, is_training=True, normalize=False)
    for image, row in zip(images, (31, 2), strict=True):
        seed_view(5, 3, row)
        assert torch.equal(torch.from_numpy(image), transform(source[row]))
    split.epoch = 4
    assert (split.__getitems__([31, 2])[0] != images).any(axis=(1, 2, 3)).all()


def test_workers_outlive_a_stop_of_all_processes(split):
    batches = iter(split.loader(batch_size=2))
    next(batches), next(batches)  # one of each worker
    for number, worker in itertools.product(STOPS, multiprocessing.active_children()):
        os.kill(worker.pid, number)
    assert sum(len(labels) for _, labels, _ in batches) == 33


def test_erasing_depends_on_seed_epoch_and_image_alone():
    images = torch.full((31, 3, 17, 19), 200, dtype=torch.uint8)
    config = AugmentConfig(scale=[0.5, 1.0], re_prob=0.5)
    augment = Augment(config, seed=5, classes=2, normalize=lambda batch: batch.float())

    def erased(rows: torch.Tensor, epoch: int) -> torch.Tensor:
        return augment(images[: len(rows)], rows, rows, epoch)[0] == 0

    rows = torch.arange(31)
    first = erased(rows, 0)
    assert 7 < first.flatten(1).any(1).sum() < 24
    assert torch.equal(erased(rows[11:13], 0), first[11:13])
    assert not torch.equal(erased(rows, 1), first)


def test_head_epochs_train_the_classifier_alone_and_then_everything(folder, tmp_path):
    def trained(epochs: int) -> tuple[dict[str, torch.Tensor], float]:
        config = config_of(folder, train={"epochs": epochs, "head_epochs": 1})
        run = train(config, tmp_path / f"{epochs} epochs")
        return load_file(run.local_folder / "model.safetensors"), run.metrics.train.pflop

    torch.manual_seed(0)
    before = create_model(config_of(folder).model, 2).state_dict()
    after, pflop = trained(1)
    assert {key for key in after if not torch.equal(after[key], before[key])} == {
        "fc.weight",
        "fc.bias",
    }
    macs = training_macs(timm.create_model("test_resnet", num_classes=2), (3, 64, 64))
    assert pflop == pytest.approx(2 * macs * 36 / 1e15)
    then, pflop = trained(2)
    assert not any(torch.equal(then[key], before[key]) for key in then)
    assert pflop == pytest.approx(2 * (1 + 3) * macs * 36 / 1e15)


@pytest.mark.usefixtures("without_figures")
def test_the_best_epoch_is_kept_also_by_a_resumed_run(folder, tmp_path, monkeypatch):
    states = []

    def scored(model: torch.nn.Module, *arguments: object) -> Scores:
        top1, loss = [(0.3, 1.0), (0.7, 1.2), (0.7, 1.1), (0.5, 0.9)][len(states)]
        states.append({key: value.clone() for key, value in model.state_dict().items()})
        return Scores(top1=top1, loss=loss, n=13)

    monkeypatch.setattr("sa_zoo.training.loop.score", scored)
    config = config_of(folder, train={"epochs": 4, "keep": "best"})
    out = tmp_path / "run"
    with signalled_by(signal.SIGUSR1, out, "checkpoints/epoch-00003-*"), pytest.raises(Interrupted):
        train(config, out)
    (out / BEST).unlink()
    run = finish(train(config, out, resume=True))
    kept = load_file(out / "model.safetensors")
    assert kept.keys() == states[2].keys()
    assert all(torch.equal(kept[key], states[2][key]) for key in kept)
    assert run.metrics.train.kept_epoch == 3 and not (out / BEST).exists()
    card = (out / "README.md").read_text()
    assert "validation images, but they chose epoch 3 of 4;" in card and "license: unknown" in card


@pytest.mark.parametrize(
    ("size", "crop_pct", "crop_mode"),
    [((64, 64), 0.875, "center"), ((64, 64), 1.0, "center"), ((83, 67), 0.875, "squash")],
)
def test_images_are_cropped_as_timm_does(size, crop_pct, crop_mode):
    image = Image.fromarray(load_sample_image("china.jpg")).resize(size)
    settings = {"input_size": (3, 64, 64), "interpolation": "bilinear"}
    settings |= {"crop_pct": crop_pct, "crop_mode": crop_mode}
    network = timm.create_model("test_resnet", pretrained_cfg_overlay=settings)
    expected = create_transform(**settings, normalize=False)(image)
    assert torch.equal(input_format_of(network).resized(image), expected)


def test_pretrained_weights_that_cannot_be_downloaded_are_an_error(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = ModelConfig(name="tf_efficientnet_lite0", init="pretrained")
    with pytest.raises(FileNotFoundError, match="tf_efficientnet_lite0 are not on this machine"):
        create_model(config, 7)
