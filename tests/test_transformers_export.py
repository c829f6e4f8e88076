"""One folder, every route, equal logits: timm, transformers, its wrapper of timm, a Hub, and no package at all."""

import json
import os
import shutil
import subprocess
import sys

import model_folders
import pytest
import timm
import torch
from hostile import change_config
from hub_server import HubServer, Repository
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_image
from timm.data import create_transform, resolve_model_data_config
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    TimmWrapperForImageClassification,
)

import sa_zoo
from sa_zoo.publishing.transformers_export import transformers_files

LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
SMALL = {"embed_dim": 23, "depth": 6, "num_heads": 5, "hidden_dim": 29}
CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def make_run(folder, name="sa_quadratic_tiny_cifar", side=32, **arguments):
    """A folder as training leaves it, made ready for transformers; the network in it."""
    model_folders.make_run(folder, name, num_classes=len(LABELS), **arguments)
    size = [3, side, side]
    change_config(label_names=LABELS, pretrained_cfg__input_size=size)(folder)
    opened = sa_zoo.open(folder)
    opened.with_files(transformers_files(opened))
    return opened.network.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, network, images, logits)"""
    folder = tmp_path_factory.mktemp("runs") / "small-run"
    network = make_run(folder, **SMALL)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return folder, network, images, network(images)


def photograph(side):
    """A real image of side x side pixels."""
    return Image.fromarray(load_sample_image("china.jpg")).resize(
        (side, side), Image.Resampling.BOX
    )


def logits_by_every_route(folder, x):
    yield timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x)
    for route in (AutoModelForImageClassification, TimmWrapperForImageClassification):
        yield route.from_pretrained(folder)(x).logits


# test_modeling_sa.py compares both faces of all variants
@pytest.mark.parametrize("variant", ["quadratic_gen", "content", "plain"])
def test_attention_survives_the_journey(variant, tmp_path):
    sizes = SMALL | {"depth": 2, "img_size": 12}
    if variant == "plain":
        del sizes["hidden_dim"]
    network = make_run(tmp_path / "run", f"sa_{variant}_cifar", 12, **sizes)
    images = torch.randn(3, 3, 12, 12)
    with torch.no_grad():
        for logits in logits_by_every_route(tmp_path / "run", images):
            # Not bit by bit: a CPU's products round by where in memory the weights of a route happen to lie.
            assert torch.allclose(logits, network(images), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "backend", "largest"),
    [(32, "torchvision", 1e-6), (61, "torchvision", 2.1 / 255), (61, "pil", 0.0)],
)
def test_the_image_processor_does_what_timm_does(run, side, backend, largest):
    # Other sizes are resized as tensors by one and as PIL images by the other backend: two grey levels at most.
    folder, network, _, _ = run
    processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
    ours = processor(photograph(side), return_tensors="pt").pixel_values[0]
    theirs = create_transform(**resolve_model_data_config(network))(photograph(side))
    assert ((ours - theirs) * torch.tensor(CIFAR[1])[:, None, None]).abs().max() <= largest


def test_timm_to_transformers_and_back_closes(run, tmp_path):
    folder, _, images, logits = run
    AutoModelForImageClassification.from_pretrained(folder).save_pretrained(tmp_path)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    network = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(network(images), logits)
    # what is saved loads without this package
    code = sorted(path.name for path in folder.glob("*.py"))
    assert sorted(path.name for path in tmp_path.glob("*.py")) == code
    old, new = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path))
    assert new == old | {"dtype": "float32"}


def test_a_network_fine_tuned_to_other_labels_closes_as_well(run, tmp_path):
    folder, _, images, _ = run
    labels = {0: "yes", 1: "no", 2: "perhaps"}
    tuned = AutoModelForImageClassification.from_pretrained(
        folder, id2label=labels, ignore_mismatched_sizes=True
    )
    with torch.no_grad():
        tuned.blocks[0].attn.terms[0].Delta += 1
        tuned.save_pretrained(tmp_path)
        network = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert torch.equal(network(images), tuned(images).logits)
    assert network.pretrained_cfg["label_names"] == ["yes", "no", "perhaps"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_args__global_pool", "", "global_pool: got '', expected 'avg'"),
        ("pretrained_cfg__crop_mode", "squash", "crop_mode: got 'squash', expected 'center'"),
    ],
)
def test_what_transformers_could_not_repeat_is_refused(run, tmp_path, key, value, message):
    folder = shutil.copytree(run[0], tmp_path / "run")
    change_config(model_type=None, **{key: value})(folder)  # as timm writes it
    with pytest.raises(ValueError, match=message):
        transformers_files(sa_zoo.open(folder))


# The classes' own code comes from the folder alone; whoever asks for the packages finds nothing.
REMOTE_CODE = """
import sys
sys.modules["sa_zoo"] = sys.modules["timm"] = None
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoBackbone, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

torch.set_grad_enabled(False)
folder, inputs, results, saved = sys.argv[1:]
x, image = load_file(inputs)["x"], Image.open(inputs + ".png")
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.")
out = {"folder": model(x).logits}
base = AutoModel.from_pretrained("you/small-run", trust_remote_code=True)
out["hub"] = model.head(base(x).pooler_output)
model.save_pretrained(saved)
out["saved"] = AutoModelForImageClassification.from_pretrained(saved, trust_remote_code=True)(x).logits
backbone = AutoBackbone.from_pretrained("you/small-run", out_indices=[5], trust_remote_code=True)
out["stage"] = backbone(x).feature_maps[0]
out["pixels"] = AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt").pixel_values
assert pipeline("image-classification", model=folder, trust_remote_code=True)(image, top_k=7)
save_file({key: value.contiguous() for key, value in out.items()}, results)
"""


def test_a_process_without_the_packages_gets_equal_numbers(run, tmp_path):
    folder, network, images, logits = run
    save_file({"x": images}, tmp_path / "inputs")
    photograph(32).save(tmp_path / "inputs.png")
    arguments = [folder, *(tmp_path / name for name in ("inputs", "results", "saved"))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with HubServer() as server:
        server.repositories["you/small-run"] = Repository()
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        server.repositories["you/small-run"].commit(files)
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", REMOTE_CODE, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment | {"HF_ENDPOINT": server.url},
        )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        (stage,) = network.forward_intermediates(images, indices=[4], intermediates_only=True)
    processor = AutoImageProcessor.from_pretrained(folder)
    expected = {
        "stage": stage,
        "pixels": processor(photograph(32), return_tensors="pt").pixel_values,
    }
    for key, value in load_file(tmp_path / "results").items():
        assert torch.allclose(value, expected.get(key, logits), atol=1e-6), key
