"""Weights by name: in a checkout, in an installation, and, once they are published, from the Hub."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from sa_zoo.models import timm_models
from sa_zoo.models.variants import VARIANTS

ROOT = Path(__file__).parents[1]
MODEL_CARDS = ROOT / "model_cards"
TRAINED = sorted(path.parent.name for path in MODEL_CARDS.glob("*/model.safetensors"))
# those of mhsa_* are of their CNN
OWN = [name for name in TRAINED if not name.startswith("mhsa_")]
LOADS = """
import json, sys, timm, torch, sa_zoo
images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
names = timm.list_models(module="timm_models", pretrained=True)
with torch.inference_mode():
    logits = {name: timm.create_model(name, pretrained=True).eval()(images).tolist() for name in names}
print(json.dumps({"from": sa_zoo.__file__, "logits": logits}))
"""


def is_stored(logits, name: str) -> bool:
    stored = json.loads((MODEL_CARDS / name / "check.json").read_text())["logits"]
    return np.allclose(logits, stored, rtol=1e-4, atol=1e-4)


def test_timm_lists_the_models_that_have_weights(monkeypatch):
    assert sorted(name for row in VARIANTS for name in timm_models.trained(row)) == OWN
    runs = tomllib.loads((ROOT / "results" / "runs.toml").read_text(encoding="utf-8"))["run"]
    filed = {run["name"] for run in runs if "weights" in run and not run.get("gpu")}
    assert set(TRAINED) == filed
    # an installation has the smaller ones
    here = [name for name in OWN if (timm_models.WEIGHTS / name / "model.safetensors").is_file()]
    assert timm.list_models(module="timm_models", pretrained=True) == here != []
    for name in OWN:
        config = json.loads((MODEL_CARDS / name / "config.json").read_text())
        assert list(timm.get_pretrained_cfg(name).label_names) == config["label_names"]
    monkeypatch.setattr(timm_models, "HUB_OWNER", "somebody")
    for row in VARIANTS:
        for tag, cfg in timm_models.configurations(row).cfgs.items():
            name = f"{row.name}.{tag}".rstrip(".")
            assert cfg.hf_hub_id == (f"somebody/{name}" if name in TRAINED else None)


def test_an_installation_has_the_weights_of_small_models(tmp_path):
    installed = tmp_path / "installed"
    build = ["egg_info", "-e", tmp_path, "build_py", "-d", installed]
    command = [sys.executable, "setup.py", "-q", *build]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packaged = list((installed / "sa_zoo" / "weights").glob("*/*"))
    assert {path.name for path in packaged} == {"model.safetensors", "metrics.json"}
    assert sum(path.stat().st_size for path in packaged) <= 16e6
    offline = {**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", "-c", LOADS]
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["from"]).is_relative_to(tmp_path)
    with_weights = {path.parent.name for path in packaged if path.suffix == ".safetensors"}
    assert found["logits"].keys() == with_weights
    assert all(is_stored(logits, name) for name, logits in found["logits"].items())


WITHOUT = {
    "sa_quadratic_cifar": "not trained yet, but sa_quadratic_tiny_cifar.long is",
    "sa_eq8_cifar": "not trained yet, but sa_quadratic_tiny_cifar.long is",
    "resnet18_cifar": r"in a checkout, .*'local-dir:model_cards/resnet18_cifar', pretrained=True",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_weights_the_error_names_others(name, monkeypatch):
    """As in an installation, which has no resnet18_cifar."""
    monkeypatch.setattr(timm_models, "is_model_pretrained", lambda name: False)
    with pytest.raises(RuntimeError, match=f"got True for {name}, .*{WITHOUT[name]}"):
        timm.create_model(name, pretrained=True)


def test_a_converted_cnn_starts_from_the_weights_of_its_cnn():
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = timm.create_model("mhsa_resnet_tiny_cifar", pretrained=True).eval()(images)
    assert is_stored(logits, "resnet_tiny_cifar")
