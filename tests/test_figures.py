"""Figures: they draw the numbers in the files, each in its place."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from model_folders import EPOCHS, METRICS, TEST, make_run
from safetensors.numpy import load_file, save_file
from small_networks import small_network

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.analysis.figures import figure_files, figures_of
from sa_zoo.analysis.head_figures import head_maps, head_paths, head_positions
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.analysis.run_figures import confusion, learning_curves
from sa_zoo.models.network import attention_in
from sa_zoo.opened import open_model

COUNTS = [[5, 2, 0], [1, 6, 0], [3, 0, 8]]  # true classes by predicted ones
SIZES = {"embed_dim": 11, "depth": 2, "hidden_dim": 13, "num_heads": 3}


@pytest.fixture
def run(tmp_path):
    """A run of a quadratic model with all files of a run."""
    folder = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", num_classes=3, **SIZES)
    test = TEST | {"confusion_matrix": COUNTS}
    (folder / "metrics.json").write_text(json.dumps({**METRICS, "test": test}))
    weights = load_file(folder / "model.safetensors")
    heads = {name: np.stack([w + 1, w]) for name, w in weights.items() if ".terms." in name}
    save_file(heads, folder / "heads.safetensors")
    return folder


def test_figures_of_a_run_have_the_same_bytes_each_time(run):
    drawn = figure_files(open_model(run))
    names = ["learning_curve", "head_positions", "head_paths", "head_maps", "confusion_matrix"]
    assert [Path(name).stem for name in drawn] == names
    for content in drawn.values():
        pixels = imread(BytesIO(content))
        assert pixels[..., :3].std() > 0.05, "not blank"
        assert 300 <= pixels.shape[1] <= 1200, "of a width that a card shows"
    assert figure_files(open_model(run)) == drawn


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("sa_learned_tiny_cifar", ["head_maps"]),
        ("sa_content_tiny_cifar", ["head_maps"]),
        ("resnet_tiny_cifar", []),
    ],
)
def test_a_run_gets_the_figures_that_it_has_data_for(tmp_path, name, figures):
    folder = make_run(tmp_path / "run", name, **SIZES if name.startswith("sa_") else {})
    maps = {f"blocks.{block}.attn": np.random.rand(3, 8, 8) for block in range(2)}
    save_file(maps, folder / "attention.safetensors")  # read where images change the maps
    assert list(figures_of(open_model(folder))) == ["learning_curve", *figures]


def test_panels_draw_the_numbers_of_their_files():
    loss, accuracy = learning_curves(EPOCHS).axes
    assert loss.get_lines()[0].get_ydata().tolist() == [line["loss"] for line in EPOCHS]
    held_out = [line["validation"]["loss"] for line in EPOCHS]
    assert loss.get_lines()[1].get_ydata().tolist() == held_out
    percent = [100 * line["top1"] for line in EPOCHS]
    assert accuracy.get_lines()[0].get_ydata() == pytest.approx(percent)
    axes = confusion(COUNTS, ["ant", "bee", "cat"]).axes[0]
    assert np.asarray(axes.images[0].get_array())[0] == pytest.approx([500 / 7, 200 / 7, 0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ant", "bee", "cat"]


def test_a_planted_head_is_on_the_correct_side_of_the_query():
    """Rows are drawn downwards, columns to the right."""
    model, center = small_network(depth=1, num_heads=1), torch.tensor([(1, -2)])
    planted = {"Delta": center, "spread": torch.tensor([9.0])}
    model.blocks[0].attn.terms[0].load_state_dict(planted)
    path = {"Delta": torch.stack([0 * center, center])}
    for figure in (head_positions([planted]), head_paths([path])):
        (axes,) = figure.axes
        assert axes.yaxis_inverted() and not axes.xaxis_inverted()
        dots = [line for line in axes.get_lines() if line.get_marker() in (".", "o")]
        assert dots[-1].get_xydata()[-1].tolist() == [-2, 1]
    P = attention_layers(model, torch.zeros(1, 3, 28, 20))[0].at((3, 2))
    (shown,) = head_maps([P]).axes[0].images
    assert shown.origin == "upper"
    assert np.unravel_index(np.argmax(shown.get_array()), (7, 5)) == (3 + 1, 2 - 2)


@pytest.mark.parametrize("S", [0.7 * np.eye(2), np.array([[1.3, 0.4], [-0.2, 0.7]])])
def test_contours_enclose_the_share_of_attention_that_they_claim(S):
    """Next to a head with uniform attention, whose contours would be infinite."""
    center = [2.0, -3.0]
    drawn = np.random.default_rng(0).multivariate_normal(center, np.linalg.inv(S @ S.T), 20_011)
    Delta, spread = torch.tensor([center, center]), torch.from_numpy(np.stack([S, 0 * S]))
    axes = head_positions([{"Delta": Delta.double(), "spread": spread}]).axes[0]
    dot, *contours = axes.get_lines()[:3]
    assert dot.get_xydata().tolist() == [[-3.0, 2.0]] and axes.get_xlim()[1] < 30
    inside = [contour.get_path().contains_points(drawn[:, ::-1]).mean() for contour in contours]
    assert inside == pytest.approx([0.5, 0.9], abs=0.01)


def test_layers_come_in_the_order_of_execution(tmp_path):
    sizes = {"embed_dim": (5, 7, 11), "depth": (1, 9, 1), "num_heads": 2}
    folder = make_run(tmp_path / "run", "sa_plain_tiny_cifar", **sizes)
    weights = load_file(folder / "model.safetensors")
    heads = {name: np.stack([rows] * 2) for name, rows in weights.items() if ".terms." in name}
    order = list(attention_in(open_model(folder).network.blocks))
    for row, layer in enumerate(order):
        heads[f"blocks.{layer}.terms.0.Delta"][:] = row
    save_file(heads, folder / "heads.safetensors")  # sorted by name, which is another order
    drawn = figures_of(open_model(folder))["head_paths"].axes[: len(order)]
    assert [axes.lines[0].get_ydata()[-1] for axes in drawn] == list(range(len(order)))


def test_figures_do_not_follow_a_link_out_of_the_folder(run, tmp_path):
    (tmp_path / "outside").mkdir()
    (run / "figures").symlink_to("../outside")
    with pytest.raises(ValueError, match="a link to"):
        open_model(run).with_files({"figures/head_maps.png": b""})
    assert not list((tmp_path / "outside").iterdir())
