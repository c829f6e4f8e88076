"""Models and training on the device "meta": as on a GPU, tensors of two devices do not mix, and nothing can be read
without waiting."""

import pytest
import torch
from accelerate import Accelerator
from small_networks import NETWORKS, images, small
from tiny_runs import MUON, tiny_config

from sa_zoo.convolution.harden import harden
from sa_zoo.fast.route import form_of
from sa_zoo.models.attention import Attention
from sa_zoo.models.terms import Quadratic
from sa_zoo.training.loop import Run
from sa_zoo.training.train import train

META = torch.device("meta")


def test_no_training_step_waits_for_the_device(monkeypatch, tmp_path):
    class Done(Exception):
        """Nothing can be scored."""

    def train_epochs(run: Run) -> None:
        for run.counters.epoch in range(2):
            run.counters.step = 0
            run.begin_epoch()
            for batches in run.remaining_batches():
                run.step(batches)
        assert batches[0][0].is_meta and all(each.is_meta for each in run.model.parameters())
        raise Done

    monkeypatch.setattr(Accelerator, "device", META)
    monkeypatch.setattr("sa_zoo.training.train.train_epochs", train_epochs)
    mixed = {"mixup": 0.8, "cutmix": 1.0, "small_epochs": 1, "crop_padding": 1, "flip": True}
    with pytest.raises(Done):
        train(
            tiny_config(**MUON | {"augment": mixed, "train": {"batch_size": 212}}), tmp_path / "r"
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_all_models_run_on_the_device_alone(name):
    network, x = small(name).to(META), images(name).to(META)
    network.train()(x).sum().backward()
    assert all(parameter.grad.is_meta for parameter in network.parameters())
    with torch.no_grad():
        assert network.eval()(x).is_meta


def test_learnable_taps_are_not_read_from_the_device(monkeypatch):
    layer, X = Attention(7, 9, (Quadratic,), (17, 11)), torch.randn(5, 17, 11, 7)
    harden(layer)
    layer.requires_grad_(True)
    with torch.no_grad():
        assert form_of(layer, X) == "taps"
        monkeypatch.setattr(Quadratic, "taps", lambda term: pytest.fail("waits for the device"))
        assert form_of(layer.to(META), X.to(META)) == "definition"
