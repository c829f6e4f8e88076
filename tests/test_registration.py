"""The Auto classes and timm know the networks in any import order, and timm's users do not pay for transformers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = """
import timm
from sa_zoo.models.attention import Attention
assert timm.is_model("sa_quadratic_cifar") and timm.is_model("mhsa_resnet18")
assert Attention.evaluate.__module__ == "sa_zoo.fast.route"
from transformers import AutoConfig, AutoModelForImageClassification, AutoModel, AutoBackbone
config = AutoConfig.for_model("sa_net", hidden_size=7, num_hidden_layers=2, num_attention_heads=3)
for auto in (AutoModelForImageClassification, AutoModel, AutoBackbone):
    assert type(auto.from_config(config)).__module__ == "sa_zoo.models.modeling_sa"
"""
# Asking whether transformers exists neither imports it nor spoils the registration, and the first module of it that is
# imported here is one that imports the Auto classes while it is being loaded.
LATER = """
import importlib.util, sa_zoo
assert not {"timm", "transformers"} & sys.modules.keys()
assert importlib.util.find_spec("transformers").name == "transformers"
import accelerate.utils
assert accelerate.utils.is_transformers_available()
assert not {"transformers", "sa_zoo.models.configuration_sa", "sa_zoo.models.modeling_sa"} & set(sys.modules)
import transformers.modeling_layers
assert not any(type(finder).__module__.startswith("sa_zoo") for finder in sys.meta_path), "it stays in the way"
assert all(callable(getattr(sa_zoo, name)) for name in sa_zoo.__all__)
assert not hasattr(sa_zoo, "nonsense")
"""
ORDERS = [
    "from timm.models import create_model; import transformers, sa_zoo",
    "import sa_zoo.models.modeling_sa",
    LATER,
]
# torch, whose order does not matter, is imported once
PROGRAM = f"""
import os, sys, torch, torchvision
for first in {ORDERS}:
    if not os.fork():
        exec(first + {BUILD!r}, {{"sys": sys}})
        sys.exit()
    assert os.wait()[1] == 0, first
"""


def test_both_libraries_know_the_networks_in_any_order():
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
