"""Plain networks in transformers, and from a run to its figures and studies."""

import pytest
import timm
import torch
from safetensors.torch import load_file
from small_networks import PLAIN, images, small
from tiny_runs import tiny_config
from torch import nn
from transformers import AutoBackbone, AutoModelForImageClassification

from sa_zoo.commands.train import train_and_finish
from sa_zoo.convolution.harden import harden
from sa_zoo.cost import cost_of, inference_macs, training_macs
from sa_zoo.models.configuration_sa import SIZES, SAConfig
from sa_zoo.models.modeling_sa import SABackbone
from sa_zoo.training.run_folder import record_maps

IMAGE = (24, 40)
STEM = (23, 39)
GRIDS = [STEM, (11, 19), (11, 19), (5, 9), (2, 4), (2, 4)]  # that attention sees
POOLED = [*GRIDS[1:], (2, 4)]
WIDTHS = [7, 7, 5, 11, 11, 11]


def backbone_of(network: nn.Module, **changes) -> SABackbone:
    """A plain network as a backbone of transformers."""
    sizes = {SIZES[name]: size for name, size in network.sizes.items()}
    config = SAConfig(attention_type="plain", image_size=list(IMAGE), **sizes, **changes)
    model = SABackbone(config).eval()
    weights = network.state_dict()
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model


def test_a_backbone_of_transformers_has_the_stages():
    network, x = small("plain"), images("plain")
    backbone = backbone_of(network, out_indices=[0, 1, 2, 3])
    assert backbone.config.stage_names == ["stem", "stage1", "stage2", "stage3"]
    assert backbone.channels == [24, 7, 5, 11]
    with torch.no_grad():
        stem, *maps = backbone(x).feature_maps
        expected = network.forward_intermediates(x, intermediates_only=True)
        assert torch.allclose(stem, network.embed(x).permute(0, 3, 1, 2), atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(maps, expected, strict=True))
    chosen = backbone.config.to_dict() | {"out_features": ["stage2"], "out_indices": None}
    last = AutoBackbone.from_config(SAConfig.from_dict(chosen))
    assert [tuple(f.shape) for f in last(x).feature_maps] == [(2, 5, 5, 9)]


def macs(by_axes: bool) -> int:
    """Multiply-adds for one image, written out by hand."""
    total = 23 * 39 * 24 * 3 * 2 * 2 + 11 * 11
    inputs = [24, *WIDTHS]
    for (height, width), D_in, D in zip(GRIDS, inputs, WIDTHS, strict=False):
        T = height * width
        keys = height + width if by_axes and T > 128 else T
        total += 2 * (T * D_in * keys + T * D_in * D)
    return total


def test_work_is_that_of_each_stages_grid_and_width():
    network = small("plain")
    assert cost_of(network, (3, *IMAGE)).macs == macs(by_axes=False)
    assert training_macs(network, (3, *IMAGE)) == macs(by_axes=True)
    harden(network)
    hard = cost_of(network, (3, *IMAGE))
    assert hard.macs == macs(by_axes=False)
    assert inference_macs(network, (3, *IMAGE)) == hard.linear_macs < hard.macs


def test_maps_of_the_middle_pixel_are_recorded_on_each_grid(tmp_path):
    network, x = small("plain, content"), images("plain, content", 7)
    record_maps(tmp_path, network, x)
    recorded = load_file(tmp_path / "attention.safetensors")
    for index, P in enumerate(network.attention_maps(x)):
        height, width = GRIDS[index]
        expected = P.mean(0).unflatten(1, (height, width))[:, height // 2, width // 2]
        got = recorded[f"blocks.{index}.attn"]
        assert torch.allclose(got, expected.unflatten(-1, (height, width)), atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    arguments = {key: list(PLAIN[key]) for key in ("embed_dim", "depth")}
    model = {"name": "sa_plain_tiny_cifar", "args": arguments | {"num_heads": 2}}
    out = tmp_path_factory.mktemp("runs") / "run"
    train_and_finish(tiny_config(model=model, data={"image_size": 32}, train={"epochs": 1}), out)
    return out


def test_a_run_leaves_figures_and_a_folder_for_both_libraries(run):
    figures = {path.stem for path in run.glob("figures/*.png")}
    assert {"head_maps", "head_depth", "head_positions", "head_paths"} <= figures
    page = (run / "explorer.html").read_text()
    assert [page.count(f'"grid":[{side},{side}]') for side in (31, 15, 7, 3)] == [1, 2, 1, 2]
    ours = AutoModelForImageClassification.from_pretrained(run)
    assert ours.config.hidden_size == [7, 5, 11]
    assert ours.config.attention_type == "plain"
    theirs = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    with torch.no_grad():
        x = torch.zeros(2, 3, 32, 32)
        assert torch.equal(ours(x).logits, theirs(x))
