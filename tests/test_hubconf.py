"""hubconf.py: torch.hub loads the models from a clone."""

import subprocess
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

from sa_zoo.convolution import timm_backbones
from sa_zoo.models import timm_models

ROOT = Path(__file__).parents[1]
NAME = "sa_quadratic_tiny_cifar"
LOAD = """
import sys, torch
from safetensors.torch import save_file
model = torch.hub.load(sys.argv[1], sys.argv[2], source="local", pretrained=True)
save_file(model.state_dict(), sys.argv[3])
"""


def test_torch_hub_loads_a_clone_with_its_weights(tmp_path):
    written = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", LOAD, str(ROOT), NAME, str(written)]
    subprocess.run(command, cwd=tmp_path, check=True)
    expected = timm.create_model(NAME, pretrained=True).state_dict()
    torch.testing.assert_close(load_file(written), dict(expected), rtol=0, atol=0)


def test_the_entry_points_are_the_models(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)

    import hubconf

    modules = (timm_models.__name__, timm_backbones.__name__)
    ours = {
        name for name in timm.list_models() if timm.model_entrypoint(name).__module__ in modules
    }
    entries = {name for name in dir(hubconf) if callable(getattr(hubconf, name))}
    assert {name.partition(".")[0] for name in entries} == ours
