"""Measures of heads, against NumPy in float64 and by known heads, and the heads that a run records."""

from itertools import pairwise

import numpy as np
import pytest
import timm
import torch
from numpy_sanet import learned, pixels, softmax
from safetensors.torch import load_file
from small_networks import pictures, small_network
from tiny_runs import MUON, tiny_config
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.analysis.heads import measure
from sa_zoo.analysis.maps import attention_layers
from sa_zoo.cli import app
from sa_zoo.commands.convert import convert_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.model import create_model
from sa_zoo.training.run_folder import record_heads, record_maps
from sa_zoo.training.train import train

H, W = 7, 5
EVERY = pixels(H, W)


def share_and_reach(P):
    """Measures of maps (N_h, T, T) on 7 x 5 pixels, from the definitions: (N_h,) each."""
    share, reach = np.zeros(len(P)), np.zeros(len(P))
    for q, k in np.ndindex(*P.shape[1:]):
        delta = np.subtract(EVERY[k], EVERY[q])
        share += P[:, q, k] / len(EVERY) * (abs(delta).max() <= 1)
        reach += P[:, q, k] / len(EVERY) * np.hypot(*delta)
    return share, reach


def test_measures_of_a_learned_model_are_the_definitions():
    model = small_network("learned")
    parameters = model.blocks[1].attn.terms[0].double().state_dict()
    term = {name: value.numpy() for name, value in parameters.items()}
    P = softmax(learned(term, np.zeros((1, H, W, 1))))[0]
    heads = measure(attention_layers(model.float(), pictures(1))[1])
    expected = share_and_reach(P)
    assert np.allclose([heads.share, heads.reach], expected, rtol=0, atol=1e-5)
    assert heads.alpha is None


def test_maps_of_a_content_model_are_averaged_over_images():
    model, x = small_network("content"), pictures(19)
    P = model.attention_maps(x)[1].detach().double().numpy()  # (19, N_h, T, T)
    heads = measure(attention_layers(model, x)[1])
    assert np.allclose([heads.share, heads.reach], share_and_reach(P.mean(0)), rtol=0, atol=1e-5)


def test_a_tilted_head_has_the_mean_sharpness_of_its_axes():
    model = small_network("quadratic_gen")
    S = np.array([[1.3, 0.4], [-0.2, 0.7]])
    term = model.blocks[0].attn.terms[0]
    term.spread.data[1] = torch.from_numpy(S)
    heads = measure(attention_layers(model, pictures(1))[0])
    assert float(heads.alpha[1]) == pytest.approx(np.linalg.eigvalsh(S @ S.T).mean() / 2, rel=1e-5)
    assert torch.equal(heads.center, term.Delta)


def test_heads_of_a_converted_layer_count_from_their_query_among_padded_keys():
    conv = torch.nn.Conv2d(3, 5, (3, 5), stride=2, padding=(1, 2))
    network = torch.nn.Sequential(sa_zoo.attention_from_conv(conv, alpha=46.0))
    heads = measure(attention_layers(network, pictures())[0])
    places = np.array([(i, j) for i in (-1, 0, 1) for j in (-2, -1, 0, 1, 2)])
    assert np.array_equal(heads.center, places)
    assert heads.alpha.tolist() == [46] * 15
    assert heads.reach.tolist() == pytest.approx(np.hypot(*places.T))
    assert heads.share.tolist() == pytest.approx((abs(places).max(axis=1) < 2).astype(float))


def quadratic(folder):
    write_timm_files(folder, small_network(), data_config={"input_size": (3, 28, 20)})


def converted(folder):
    convert_model("resnet_tiny_cifar", folder)


def transformer(folder):
    torch.manual_seed(0)
    sizes = {"img_size": 64, "depth": 2, "dynamic_img_size": False}
    write_timm_files(folder, timm.create_model("test_vit", num_classes=10, **sizes))


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("make", "options", "layers", "alpha"),
    [
        (quadratic, [], ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"], True),
        (converted, [], ["conv1", "layer1.0.conv1", "layer1.0.conv2"], True),
        (transformer, ["--data", "digits"], ["blocks.0.attn", "blocks.1.attn"], False),
    ],
)
def test_the_command_describes_every_layer(make, options, layers, alpha, tmp_path):
    make(tmp_path)
    result = CliRunner().invoke(app, ["heads", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")] for line in result.stdout.splitlines()[2:]]
    assert list(dict.fromkeys(row[1] for row in rows))[: len(layers)] == layers
    assert all(bool(row[4]) == (alpha and row[2] != "mean") for row in rows)
    assert all(row[5].endswith("%") and float(row[6]) >= 0 for row in rows)


def test_heads_are_recorded_at_the_start_and_after_every_epoch(tmp_path):
    config = tiny_config(**MUON | {"train": {"epochs": 3, "seed": 5}})
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


def test_a_resumed_run_replaces_the_heads_of_later_epochs(tmp_path):
    for epoch in (0, 1, 2, 1):
        record_heads(tmp_path, small_network("learned"), epoch)
    rows = load_file(tmp_path / "heads.safetensors")
    assert {name.rpartition(".")[2] for name in rows} == {"row", "col", "w", "v"}
    assert all(len(values) == 2 for values in rows.values())


def test_mean_maps_of_the_middle_pixel_are_recorded_if_images_change_them(tmp_path):
    record_maps(tmp_path, small_network(), pictures())
    assert not list(tmp_path.iterdir())
    model = small_network("content")
    record_maps(tmp_path, model, pictures(11))
    recorded = load_file(tmp_path / "attention.safetensors")
    for index, P in enumerate(model.attention_maps(pictures(11))):
        middle = P.mean(0)[:, EVERY.index((3, 2))].unflatten(-1, (H, W))
        assert torch.allclose(recorded[f"blocks.{index}.attn"], middle, atol=1e-6)
