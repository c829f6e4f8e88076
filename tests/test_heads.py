"""What a run records of its heads: positional parameters of each epoch, and maps that images change."""

from itertools import pairwise

import pytest
import timm
import torch
from safetensors.torch import load_file
from small_networks import pictures, small_network
from tiny_runs import MUON, tiny_config

from sa_zoo.training.model import create_model
from sa_zoo.training.run_folder import record_heads, record_maps
from sa_zoo.training.train import train


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


@pytest.mark.parametrize("variant", ["content", "mixed", "quadratic"])
def test_maps_are_averaged_over_images_that_change_them(tmp_path, variant):
    model = small_network(variant)
    record_maps(tmp_path, model, pictures(11))
    path = tmp_path / "attention.safetensors"
    assert path.exists() == (variant != "quadratic")
    recorded = load_file(path) if path.exists() else {}
    for index, P in enumerate(model.attention_maps(pictures(11)) if recorded else []):
        mean = P if P.ndim == 3 else P.mean(0)  # early layers of a mixed network see no content
        middle = mean.unflatten(1, (7, 5))[:, 3, 2].unflatten(-1, (7, 5))
        assert torch.allclose(recorded[f"blocks.{index}.attn"], middle, atol=1e-6)
