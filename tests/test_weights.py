"""Weights of trained models: by name, in a checkout or an installation, and as folders that both libraries load."""

import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch

import sa_zoo
from sa_zoo.models import timm_models
from sa_zoo.models.variants import VARIANTS
from sa_zoo.publishing.card import render_card
from sa_zoo.publishing.folder import check_loads
from sa_zoo.training.config import load_config

ROOT = Path(__file__).parents[1]
MODEL_CARDS = ROOT / "model_cards"
TRAINED = sorted(path.parent.name for path in MODEL_CARDS.glob("*/model.safetensors"))
# those of mhsa_* are of their CNN
OWN = [name for name in TRAINED if not name.startswith("mhsa_")]


@pytest.mark.parametrize("name", TRAINED)
def test_a_committed_folder_loads_everywhere_with_the_logits_of_its_weights(name):
    opened = sa_zoo.open(MODEL_CARDS / name)
    assert (MODEL_CARDS / name / "README.md").read_text() == render_card(opened)
    assert (
        load_config(MODEL_CARDS / name / "train.toml").model.name == opened.config["architecture"]
    )
    check = json.loads((MODEL_CARDS / name / "check.json").read_text())
    content = (MODEL_CARDS / name / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == check["sha256"]
    logits = check_loads(opened.network, MODEL_CARDS / name)
    assert torch.allclose(logits, torch.tensor(check["logits"]), rtol=1e-4, atol=1e-4)


def test_timm_lists_the_models_that_have_weights():
    assert sorted(name for row in VARIANTS for name in timm_models.trained(row)) == OWN
    # an installation has the smaller ones
    here = [name for name in OWN if (timm_models.WEIGHTS / name / "model.safetensors").is_file()]
    assert timm.list_models(module="timm_models", pretrained=True) == here != []
    for name in OWN:
        config = json.loads((MODEL_CARDS / name / "config.json").read_text())
        assert list(timm.get_pretrained_cfg(name).label_names) == config["label_names"]


def test_without_weights_the_error_names_others():
    """timm would return random weights."""
    for name in ("sa_eq8_cifar", "sa_absolute_cifar"):
        with pytest.raises(RuntimeError, match=f"got True for {name}, .*sa_quadratic_tiny_cifar"):
            timm.create_model(name, pretrained=True)


def test_a_converted_cnn_starts_from_the_weights_of_its_cnn():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    stored = json.loads((MODEL_CARDS / "resnet_tiny_cifar" / "check.json").read_text())["logits"]
    with torch.inference_mode():
        logits = timm.create_model("mhsa_resnet_tiny_cifar", pretrained=True).eval()(images)
    assert torch.allclose(logits, torch.tensor(stored), rtol=1e-4, atol=1e-4)
