from itertools import pairwise

import pytest
import timm
import torch
from safetensors.torch import load_file
from tiny_runs import MUON, tiny_config

import sa_zoo  # noqa: F401  registers its names with timm
from sa_zoo.training.model import create_model
from sa_zoo.training.run_folder import record_heads, record_maps
from sa_zoo.training.train import train


def test_heads_are_recorded_at_initialization_and_after_every_epoch(tmp_path):
    config = tiny_config(**MUON)
    train(config, tmp_path / "run")
    recorded = load_file(tmp_path / "run" / "heads.safetensors")
    published = load_file(tmp_path / "run" / "model.safetensors")
    terms = [f"blocks.{block}.attn.terms.0" for block in (0, 1)]
    shapes = {
        f"{term}.{name}": shape
        for term in terms
        for name, shape in (("Delta", (4, 3, 2)), ("spread", (4, 3)))
    }
    assert {name: tuple(rows.shape) for name, rows in recorded.items()} == shapes
    torch.manual_seed(config.train.seed)
    initial = create_model(config.model, 10).state_dict()
    for name, rows in recorded.items():
        assert torch.equal(rows[0], initial[name])
        assert torch.equal(rows[-1], published[name])
        assert all(not torch.equal(before, after) for before, after in pairwise(rows))


def test_the_weight_average_is_recorded_where_it_is_published(tmp_path):
    train(tiny_config(**{**MUON, "train": {"epochs": 2, "ema": 0.9}}), tmp_path / "run")
    published = load_file(tmp_path / "run" / "model.safetensors")
    for name, rows in load_file(tmp_path / "run" / "heads.safetensors").items():
        assert torch.equal(rows[-1], published[name])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("sa_learned_tiny_cifar", {"row", "col", "w", "v"}),
        ("sa_content_tiny_cifar", {"row", "col"}),  # of its queries and keys nothing is positional
    ],
)
def test_what_depends_on_positions_alone_is_recorded(tmp_path, model, names):
    record_heads(tmp_path, timm.create_model(model, depth=1), 0)
    assert load_file(tmp_path / "heads.safetensors").keys() == {
        f"blocks.0.attn.terms.0.{name}" for name in names
    }


def test_a_model_without_positional_parameters_leaves_no_record(tmp_path):
    record_heads(tmp_path, timm.create_model("resnet_tiny_cifar"), 0)
    assert not any(tmp_path.iterdir())


def test_later_rows_are_replaced(tmp_path):
    model = timm.create_model("sa_quadratic_tiny_cifar", depth=1)
    for epoch in (0, 1, 2, 1):
        record_heads(tmp_path, model, epoch)
    assert all(len(rows) == 2 for rows in load_file(tmp_path / "heads.safetensors").values())


@pytest.mark.parametrize("variant", ["content", "absolute", "mixed"])
def test_what_heads_attend_to_is_averaged_over_images(tmp_path, variant):
    torch.manual_seed(0)
    sizes = {"embed_dim": 11, "depth": 2, "num_heads": 3, "hidden_dim": 13, "patch_size": 2}
    model = timm.create_model(
        f"sa_{variant}_cifar", img_size=(10, 14), **sizes
    ).eval()  # 5 x 7 pixels
    images = torch.randn(7, 3, 10, 14)
    record_maps(tmp_path, model, images)
    recorded = load_file(tmp_path / "attention.safetensors")
    for index, P in enumerate(model.attention_maps(images)):
        mean = (
            P if P.ndim == 3 else P.mean(0)
        )  # the early blocks of a mixed network look at positions only
        expected = mean.unflatten(1, (5, 7))[:, 2, 3].unflatten(
            -1, (5, 7)
        )  # of the pixel in the middle
        assert torch.allclose(recorded[f"blocks.{index}.attn"], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["sa_quadratic_tiny_cifar", "resnet_tiny_cifar"])
def test_attention_that_no_image_changes_is_not_recorded(tmp_path, name):
    record_maps(tmp_path, timm.create_model(name), torch.zeros(2, 3, 32, 32))
    assert not any(tmp_path.iterdir())


def test_a_run_of_a_content_model_records_its_maps(tmp_path):
    model = {"name": "sa_content_tiny_cifar", "args": MUON["model"]["args"]}
    train(tiny_config(model=model, train={"epochs": 1}), tmp_path)
    maps = load_file(tmp_path / "attention.safetensors")
    assert {name: tuple(P.shape) for name, P in maps.items()} == {
        f"blocks.{i}.attn": (3, 4, 4) for i in (0, 1)
    }
