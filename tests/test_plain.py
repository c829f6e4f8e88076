"""Plain networks: their work, and from a run to its figures and a folder."""

import timm
import torch
from small_networks import PLAIN, small
from tiny_runs import tiny_config
from transformers import AutoModelForImageClassification

from sa_zoo.commands.train import train_and_finish
from sa_zoo.convolution.harden import harden
from sa_zoo.cost import cost_of, training_macs

IMAGE = (24, 40)
STEM = (23, 39)
GRIDS = [STEM, (11, 19), (11, 19), (5, 9), (2, 4), (2, 4)]  # that attention sees
WIDTHS = [7, 7, 5, 11, 11, 11]


def macs(by_axes: bool) -> int:
    """Multiply-adds for one image."""
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
    assert cost_of(network, (3, *IMAGE)).macs == macs(by_axes=False)


def test_a_run_leaves_figures_and_a_folder_for_both_libraries(tmp_path):
    arguments = {key: list(PLAIN[key]) for key in ("embed_dim", "depth")}
    model = {"name": "sa_plain_tiny_cifar", "args": arguments | {"num_heads": 2}}
    run = tmp_path / "run"
    train_and_finish(tiny_config(model=model, data={"image_size": 32}, train={"epochs": 1}), run)
    figures = {path.stem for path in run.glob("figures/*.png")}
    assert {"head_maps", "head_positions", "head_paths"} <= figures
    page = (run / "explorer.html").read_text()
    assert [page.count(f'"grid":[{side},{side}]') for side in (31, 15, 7, 3)] == [1, 2, 1, 2]
    ours = AutoModelForImageClassification.from_pretrained(run)
    assert ours.config.hidden_size == [7, 5, 11]
    assert ours.config.attention_type == "plain"
    theirs = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    with torch.no_grad():
        x = torch.zeros(2, 3, 32, 32)
        assert torch.equal(ours(x).logits, theirs(x))
