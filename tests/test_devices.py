"""Models and training on a simulated GPU: nothing is left on the CPU, and no step waits for the device."""

import copy

import pytest
import timm
import torch
from accelerate import Accelerator
from simulated_gpu import GPU, OnGPU, SimulatedGPU, never_waiting
from tiny_runs import MUON, tiny_config

from sa_zoo.convolution.harden import harden
from sa_zoo.fast.route import form_of
from sa_zoo.models.attention import Attention
from sa_zoo.models.plain import PlainNet
from sa_zoo.models.terms import Quadratic
from sa_zoo.models.variants import VARIANTS
from sa_zoo.training.loop import Run
from sa_zoo.training.train import train


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Routes are chosen as for tensors of a GPU, which are ordinary."""
    monkeypatch.setattr("sa_zoo.fast.taps.is_ordinary", lambda *tensors: True)
    with SimulatedGPU():
        yield


MIXED = {"mixup": 0.8, "cutmix": 1.0, "small_epochs": 1}
# of an attention network; its grid stays, which decides how it is evaluated
SIZES = {"embed_dim": 36, "hidden_dim": 17, "num_heads": 3, "depth": 2}


def test_no_training_step_waits_for_the_device(monkeypatch, tmp_path):
    monkeypatch.setattr(Accelerator, "device", GPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "simulated GPU")
    steps = []
    step = Run.step

    def counted(run, batches):
        with never_waiting():
            step(run, batches)
        steps.append(all(isinstance(p, OnGPU) for p in run.model.parameters()))

    monkeypatch.setattr(Run, "step", counted)
    recipe = MUON | {"augment": MIXED, "train": {"epochs": 3, "batch_size": 212}}
    metrics = train(tiny_config(**recipe), tmp_path / "run").metrics
    assert steps == [True] * 3 * 6
    assert metrics.environment["device"] == "simulated GPU"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_all_models_run_on_the_device_alone(variant):
    """Forward and backward, with the numbers of the CPU; `eval` takes the routes of inference."""
    torch.manual_seed(0)
    sizes = SIZES if variant.terms else {}
    if variant.network is PlainNet:
        sizes = {name: size for name, size in sizes.items() if name != "hidden_dim"}
    on_cpu = timm.create_model(variant.name, **sizes)
    x = torch.randn(3, 3, 32, 32)
    gradients = []
    for network, images in ((on_cpu, x), (copy.deepcopy(on_cpu).to("cuda"), x.to("cuda"))):
        network.train()
        network(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
        with torch.no_grad():
            network.eval()(images)
    largest = max(on_host.abs().max() for on_host in gradients[0])
    for on_host, on_device in zip(*gradients, strict=True):
        assert isinstance(on_device, OnGPU)
        # a bias before batch normalization has a gradient of rounding errors
        atol = 1e-4 * on_host.abs().max() + 1e-7 * largest
        assert torch.allclose(on_device.cpu(), on_host, rtol=1e-3, atol=atol)


def test_only_frozen_taps_are_read_from_the_device():
    on_cpu, X = Attention(7, 9, (Quadratic,), (17, 11)), torch.randn(5, 17, 11, 7)
    harden(on_cpu)
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    assert form_of(on_gpu, X.to("cuda")) == "taps"
    for layer, images, form in ((on_cpu, X, "taps"), (on_gpu, X.to("cuda"), "definition")):
        layer.requires_grad_(True)
        with never_waiting(), torch.no_grad():
            assert form_of(layer, images) == form
