"""Measures of heads: against NumPy in float64, and heads that were planted. What a run records of its heads."""

from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
from numpy_convolution import nearest_convolution
from numpy_sanet import learned, pixels, softmax
from safetensors.torch import load_file
from small_networks import KERNEL, convolutional_network, pictures, small_network
from timm.utils import reparameterize_model
from tiny_runs import MUON, tiny_config
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.analysis import heads as analysis
from sa_zoo.analysis.heads import measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cli import app
from sa_zoo.commands.convert import convert_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.model import create_model
from sa_zoo.training.run_folder import record_heads, record_maps
from sa_zoo.training.train import train

H, W = 7, 5


def by_loops(P, window):
    """share, reach (N_h,) and center (N_h, 2) of maps (N_h, T, T), from the definitions."""
    places, inner = pixels(H, W), 0
    share, reach, center = np.zeros(len(P)), np.zeros(len(P)), np.zeros((len(P), 2))
    for q, (y, x) in enumerate(places):
        far_from_border = H // 4 <= y < H - H // 4 and W // 4 <= x < W - W // 4
        inner += far_from_border
        for k, (i, j) in enumerate(places):
            delta = np.array([i - y, j - x])
            share += P[:, q, k] * (abs(delta).max() <= window // 2) / len(places)
            reach += P[:, q, k] * np.hypot(*delta) / len(places)
            center += far_from_border * np.outer(P[:, q, k], delta)
    return share, reach, center / inner


@pytest.mark.parametrize("window", [1, 3, 5])
def test_measures_of_a_learned_model_are_the_definitions(window):
    model = small_network("learned")
    parameters = model.blocks[1].attn.terms[0].double().state_dict()
    term = {name: value.numpy() for name, value in parameters.items()}
    P = softmax(learned(term, np.zeros((1, H, W, 1))))
    share, reach, center = by_loops(P, window)
    heads = measure(attention_layers(model.float(), pictures(1))[1], window)
    assert heads.share.numpy() == pytest.approx(share, abs=1e-6)
    assert heads.reach.numpy() == pytest.approx(reach, abs=1e-5)
    assert heads.center.numpy() == pytest.approx(center, abs=1e-5)
    _, C = nearest_convolution(P, (H, W), window)
    distance = np.abs(P - C).sum(-1).mean(-1)
    assert heads.distance.numpy() == pytest.approx(distance, abs=1e-5)
    assert heads.alpha is None
    assert heads.variation.tolist() == [0] * 5


def test_maps_of_a_content_model_are_averaged_over_images():
    model, x = small_network("content"), pictures(19)
    P = model.attention_maps(x)[1].detach().double().numpy()  # (19, N_h, T, T)
    heads = measure(attention_layers(model, x)[1])
    assert heads.share.numpy() == pytest.approx(by_loops(P.mean(0), 3)[0], abs=1e-6)
    moved = 0.5 * np.abs(P - P.mean(0)).sum(-1).mean((0, 2))
    assert heads.variation.numpy() == pytest.approx(moved, abs=1e-6)
    assert moved.min() > 0.001


@pytest.mark.parametrize("alpha", [72.0, 2048.0])
@pytest.mark.parametrize("largest", [2**25, 9 * 64 * 30])  # all queries, or 5 x 5 of them
def test_planted_heads_are_described_as_they_are(alpha, largest, monkeypatch):
    monkeypatch.setattr(analysis, "LARGEST", largest)
    network = convolutional_network()
    if alpha > 100:  # deployed as taps
        sa_zoo.harden(network)
        network = reparameterize_model(network)
    layer = attention_layers(network, torch.zeros(1, 3, 16, 16))[0]
    heads = measure(layer, window=3)
    assert [tuple(center) for center in heads.center.tolist()] == KERNEL
    assert heads.alpha.tolist() == pytest.approx([alpha] * 9)
    assert heads.share.tolist() == pytest.approx([1.0] * 9)
    assert heads.distance.max() < 1e-9
    beyond_the_window = measure(layer, window=1).distance > 0.9
    assert beyond_the_window.tolist() == [shift != (0, 0) for shift in KERNEL]


def test_a_tilted_head_has_the_sharpness_of_its_eigenvalues():
    model = small_network("quadratic_gen")
    S = np.array([[1.3, 0.4], [-0.2, 0.7]])
    model.blocks[0].attn.terms[0].spread.data[1] = torch.from_numpy(S)
    heads = measure(attention_layers(model, pictures(1))[0])
    small, large = np.linalg.eigvalsh(S @ S.T)
    assert heads.alpha[1].item() == pytest.approx((small + large) / 4, rel=1e-5)


def test_heads_of_a_converted_layer_count_from_their_query_among_padded_keys():
    conv = torch.nn.Conv2d(3, 5, (3, 5), stride=2, padding=(1, 2))
    network = torch.nn.Sequential(sa_zoo.attention_from_conv(conv, alpha=46.0))
    heads = measure(attention_layers(network, pictures())[0], window=5)
    places = [(i, j) for i in (-1, 0, 1) for j in (-2, -1, 0, 1, 2)]
    assert [tuple(center) for center in heads.center.tolist()] == places
    assert heads.reach.tolist() == pytest.approx([np.hypot(*place) for place in places])
    assert heads.share.tolist() == pytest.approx([1.0] * 15)
    assert heads.distance.max() < 1e-9


def rows_of(*arguments):
    """The rows of the table that `sa-zoo heads` prints."""
    result = CliRunner().invoke(app, ["heads", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    lines = [line.strip("| ") for line in result.stdout.splitlines()]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def test_the_table_of_a_folder_needs_no_data(tmp_path):
    write_timm_files(tmp_path, convolutional_network(), data_config={"input_size": (3, 16, 16)})
    rows = rows_of(tmp_path, "--window", "3", "--out", tmp_path / "out")
    assert [row[3] for row in rows if row[1] != "mean"] == ["tap"] * 18
    assert "| tap |" in (tmp_path / "out" / "heads.md").read_text()
    assert (tmp_path / "out" / "head_depth.png").is_file()


def test_every_layer_of_a_converted_network_is_described(tmp_path):
    convert_model("resnet_tiny_cifar", tmp_path / "converted")
    rows = rows_of(tmp_path / "converted")
    layers = [name for name, _ in timm.create_model("resnet_tiny_cifar").named_modules()]
    shown = list(dict.fromkeys(row[0] for row in rows))
    assert "conv1" in shown and "layer1.0.downsample.0" in shown and set(shown) <= set(layers)
    assert {row[3] for row in rows if row[1] != "mean"} == {"tap"}


def test_heads_of_a_transformer_are_described_on_images(tmp_path):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "depth": 2, "dynamic_img_size": False}
    write_timm_files(tmp_path, timm.create_model("test_vit", num_classes=10, **sizes))
    rows = rows_of(tmp_path, "--data", "digits", "--window", "1")
    assert [row[1] for row in rows] == ["1", "2", "mean"] * 2
    assert all(row[7].endswith("%") for row in rows)


def test_heads_are_recorded_at_the_start_and_after_every_epoch(tmp_path):
    config = tiny_config(**MUON)
    train(config, tmp_path / "run")
    recorded = load_file(tmp_path / "run" / "heads.safetensors")
    published = load_file(tmp_path / "run" / "model.safetensors")
    torch.manual_seed(config.train.seed)
    initial = create_model(config.model, 10).state_dict()
    assert recorded.keys() == {name for name in initial if name.endswith(("Delta", "spread"))}
    for name, rows in recorded.items():
        assert len(rows) == 4
        assert torch.equal(rows[0], initial[name])
        assert torch.equal(rows[-1], published[name])
        assert all(not torch.equal(before, after) for before, after in pairwise(rows))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("sa_learned_tiny_cifar", {"row", "col", "w", "v"}),
        ("sa_content_tiny_cifar", {"row", "col"}),  # of its queries and keys nothing is positional
        ("resnet_tiny_cifar", set()),
    ],
)
def test_positional_parameters_are_recorded_and_replaced(tmp_path, model, names):
    network = timm.create_model(model)
    for epoch in (0, 1, 2, 1):
        record_heads(tmp_path, network, epoch)
    path = tmp_path / "heads.safetensors"
    rows = load_file(path) if path.exists() else {}
    assert {name.rpartition(".")[2] for name in rows} == names
    assert all(len(values) == 2 for values in rows.values())


@pytest.mark.parametrize("variant", ["content", "quadratic"])
def test_maps_are_averaged_over_images_that_change_them(tmp_path, variant):
    model = small_network(variant)
    record_maps(tmp_path, model, pictures(11))
    path = tmp_path / "attention.safetensors"
    assert path.exists() == (variant != "quadratic")
    recorded = load_file(path) if path.exists() else {}
    for index, P in enumerate(model.attention_maps(pictures(11)) if recorded else []):
        mean = P if P.ndim == 3 else P.mean(0)
        middle = mean.unflatten(1, (7, 5))[:, 3, 2].unflatten(-1, (7, 5))
        assert torch.allclose(recorded[f"blocks.{index}.attn"], middle, atol=1e-6)
