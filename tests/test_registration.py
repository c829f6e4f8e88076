"""The Auto classes know the networks in either import order, and timm's users do not pay for it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
from transformers import AutoConfig, AutoModelForImageClassification, AutoModel, AutoBackbone
config = AutoConfig.for_model("sa_net", hidden_size=7, num_hidden_layers=2, num_attention_heads=3)
print(*(type(auto.from_config(config)).__name__ for auto in (AutoModelForImageClassification, AutoModel, AutoBackbone)))
"""
# Asking whether transformers exists neither imports it nor spoils the registration, and the first module of it that is
# imported here is one that imports the Auto classes while it is being loaded.
LATER = """
import importlib.util, sys, sa_zoo
assert importlib.util.find_spec("transformers").name == "transformers"
import accelerate.utils
assert accelerate.utils.is_transformers_available()
assert not {"transformers", "sa_zoo.models.configuration_sa", "sa_zoo.models.modeling_sa"} & set(sys.modules)
import transformers.modeling_layers
assert not any(type(finder).__module__.startswith("sa_zoo") for finder in sys.meta_path), "it stays in the way"
"""


def run(code):
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "first",
    [
        "import transformers, sa_zoo",
        LATER,
        "import sa_zoo.models.modeling_sa",
    ],
)
def test_the_auto_classes_know_the_networks_in_any_order(first):
    assert run(first + BUILD) == "SAForImageClassification SAModel SABackbone"


@pytest.mark.parametrize(
    "first",
    [
        "from timm.models import create_model; import sa_zoo",
        "from sa_zoo.fast import route",
    ],
)
def test_names_and_kernels_are_there_in_any_order(first):
    code = f"""
{first}
import timm
from sa_zoo.convolution.timm_backbones import *
from sa_zoo.models.timm_models import *
from sa_zoo.models.attention import Attention
from sa_zoo.models.network import SANet
assert timm.is_model("sa_quadratic_cifar") and timm.is_model("mhsa_resnet18")
model = timm.create_model("sa_quadratic_tiny_cifar", depth=1)
assert isinstance(model, SANet) and Attention.evaluate.__module__ == "sa_zoo.fast.route"
"""
    run(code)


def test_torch_and_timm_wait_until_a_name_is_used():
    code = """
import sys, sa_zoo
assert not {"torch", "timm", "transformers"} & sys.modules.keys()
assert set(sa_zoo.__all__) == set(sa_zoo.HOMES)
assert sa_zoo.convert.__module__ == "sa_zoo.convolution.network_conversion" and "timm" in sys.modules
assert all(callable(getattr(sa_zoo, name)) for name in sa_zoo.__all__)
assert not hasattr(sa_zoo, "nonsense")
"""
    run(code)
