"""Libraries that people use the models with: a row of docs/clients.json each, which `--record docs` writes.

pip install segmentation_models_pytorch tries all of them.
"""

import ast
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import sa_zoo

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "clients.json"
USAGE = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", USAGE, re.DOTALL | re.MULTILINE)
ATTENTION = "sa_quadratic_tiny_cifar"  # its weights come with the package
DECODERS = (
    "Unet UnetPlusPlus MAnet Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet Segformer DPT"
)
# Sizes of transformers' models
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 31, "decoder_ffn_dim": 37}
DETR = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2} | LAYERS


def images(number: int = 2, side: int = 32) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))


def trains(network: nn.Module, output: Tensor) -> None:
    """Each kernel of the backbone's attention gets a gradient."""
    output.square().sum().backward()
    kernels = [p for name, p in network.named_parameters() if name.endswith("W_val.weight")]
    assert kernels and all(kernel.grad is not None for kernel in kernels)


def image_pipeline(folder):
    """`pipeline("image-classification", "mhsa")` with a converted CNN, against timm"""
    from transformers import pipeline

    from sa_zoo.commands.convert import convert_model

    pixels = images(1, 32)[0].permute(1, 2, 0).mul(40).add(128).clamp(0, 255)
    picture = Image.fromarray(pixels.byte().numpy())
    converted, _ = convert_model("resnet_tiny_cifar", folder / "mhsa")
    scores = pipeline("image-classification", str(folder / "mhsa"), top_k=10)(picture)
    config = timm.data.resolve_model_data_config(converted.network)
    logits = converted.network(timm.data.create_transform(**config)(picture)[None])
    expected = logits.softmax(-1)[0].sort(descending=True).values
    found = torch.tensor([row["score"] for row in scores])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return "works: the scores that timm gives"


def detr(_):
    """DETR with the backbone `mhsa_resnet18`: a training step"""
    from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig

    backbone = TimmBackboneConfig(backbone="mhsa_resnet18", out_indices=[1, 2, 3, 4])
    network = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **DETR))
    trains(network, network(images(2, 64)).logits)


def detr_converted(_):
    """`sa_zoo.convert(detr, layers="*layer4*", alpha=4.0)`: a training step"""
    (example,) = [block for block in BLOCKS if "DetrConfig" in block]
    defined: dict[str, Any] = {"sa_zoo": sa_zoo}
    exec(example, defined)
    layers = defined["report"].layers
    assert all("layer4" in layer.name and layer.alpha == 4.0 for layer in layers)
    return f"works: {len(layers)} layers are attention whose centers and sharpness train"


def dpt(_):
    """DPT with a network of attention as the backbone (`SAConfig(reshape_hidden_states=False)`): a training step"""
    from transformers import DPTConfig, DPTForDepthEstimation

    from sa_zoo.models.configuration_sa import SAConfig

    tokens = {"image_size": 32, "patch_size": 4}
    sizes = {"num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 3}
    maps = {"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    config = DPTConfig(
        backbone_config=SAConfig(intermediate_size=17, **sizes, **tokens, **maps),
        hidden_size=24,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        readout_type="ignore",
        **tokens,
    )
    network = DPTForDepthEstimation(config)
    depth = network(images()).predicted_depth
    trains(network, depth)
    return f"works: a map of {depth.shape[1]}x{depth.shape[2]}"


def decoders(_):
    """Segmentation with `tu-mhsa_resnet18` as the encoder: a training step with each decoder"""
    import segmentation_models_pytorch as smp

    for decoder in DECODERS.split():
        network = getattr(smp, decoder)("tu-mhsa_resnet18", encoder_weights=None, classes=2)
        masks = network(images(2, 128))
        assert masks.shape == (2, 2, 128, 128)
        trains(network, masks)
    return f"works with {', '.join(DECODERS.split())}"


# The functions of each library, by the name of its distribution, in the order of the table
CLIENTS = {
    "transformers": (image_pipeline, detr, detr_converted, dpt),
    "segmentation_models_pytorch": (decoders,),
}
FUNCTIONS = [(client, function) for client in CLIENTS for function in CLIENTS[client]]


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(("client", "function"), FUNCTIONS)
def test_client(client, function, request, tmp_path):
    try:
        found = version(client).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{client} is not installed")
    torch.manual_seed(0)
    result = function(tmp_path) or "works"
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    row = rows[FUNCTIONS.index((client, function))]
    if request.config.getoption("record"):
        row |= {"client": client, "version": found, "done": function.__doc__, "result": result}
        TABLE.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    assert (row["client"], row["done"], row["result"]) == (client, function.__doc__, result)


@pytest.mark.parametrize("name", [ATTENTION, "mhsa_resnet_tiny_cifar"])
def test_the_examples_of_activation_maps_have_channels_first(name):
    network, x = timm.create_model(name, pretrained=True).eval(), images(3)
    features = network.forward_features(x)
    if name == ATTENTION:
        features = defined_by("pytorch_grad_cam")["channels_first"](features)
    assert features.shape[1] == network.num_features
    kept = []
    wrapped = defined_by("captum")["ChannelsFirst"](network)
    wrapped.features.register_forward_hook(lambda _, __, output: kept.append(output))
    assert torch.equal(wrapped(x), network(x))
    assert torch.equal(kept[0], features)


def defined_by(library: str) -> dict[str, Any]:
    """The functions and classes of the example that uses a library, which need not be installed."""
    (example,) = [block for block in BLOCKS if library in block]
    tree = ast.parse(example)
    tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined: dict[str, Any] = {"torch": torch}
    exec(compile(tree, "usage.md", "exec"), defined)
    return defined
