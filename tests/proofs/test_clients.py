"""Libraries that people use the models with: a row of docs/clients.json each, which `--record docs` writes.

pip install segmentation_models_pytorch grad-cam captum fastai lightning torchao tries all of them.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
DETR = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5}
DETR |= LAYERS
SA = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 17}


def attention_network() -> nn.Module:
    return timm.create_model(ATTENTION, pretrained=True).eval()


def images(number: int = 2, side: int = 32) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))


def digits(number: int) -> TensorDataset:
    """Handwritten digits as images (3, 32, 32)."""
    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels[:number], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    large = F.interpolate(small, (32, 32)).expand(-1, 3, -1, -1)
    return TensorDataset(large, torch.tensor(labels[:number]))


def near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def trains(network: nn.Module, output: Tensor) -> None:
    """Each kernel of the backbone's attention gets a gradient."""
    output.square().sum().backward()
    kernels = [p for name, p in network.named_parameters() if name.endswith("W_val.weight")]
    assert kernels and all(kernel.grad is not None for kernel in kernels)


def decoders():
    """Segmentation with `tu-mhsa_resnet18` as the encoder: a training step with each decoder"""
    import segmentation_models_pytorch as smp

    for decoder in DECODERS.split():
        network = getattr(smp, decoder)("tu-mhsa_resnet18", encoder_weights=None, classes=2)
        masks = network(images(2, 128))
        assert masks.shape == (2, 2, 128, 128)
        trains(network, masks)
    return f"works with {', '.join(DECODERS.split())}"


def decoder_of_one_size():
    """Segmentation with `tu-sa_quadratic_tiny_cifar` as the encoder of a Unet"""
    import segmentation_models_pytorch as smp

    with pytest.raises(ValueError, match="Unsupported model downsampling pattern") as error:
        smp.Unet(f"tu-{ATTENTION}", encoder_weights=None, classes=2)
    return f"**does not work**: ValueError: {error.value}"


def timm_backbone(*levels: int, name: str = "mhsa_resnet18") -> Any:
    from transformers import TimmBackboneConfig

    return TimmBackboneConfig(backbone=name, out_indices=list(levels))


def detr():
    """DETR with the backbone `mhsa_resnet18`: a training step"""
    from transformers import DetrConfig, DetrForObjectDetection

    network = DetrForObjectDetection(DetrConfig(backbone_config=timm_backbone(1, 2, 3, 4), **DETR))
    trains(network, network(images(2, 64)).logits)


def detr_converted():
    """`sa_zoo.convert(detr, layers="*layer4*", alpha=4.0)`: a training step"""
    (example,) = [block for block in BLOCKS if "DetrConfig" in block]
    defined: dict[str, Any] = {"sa_zoo": sa_zoo}
    exec(example, defined)
    layers = defined["report"].layers
    assert all("layer4" in layer.name and layer.alpha == 4.0 for layer in layers)
    return f"works: {len(layers)} layers are attention whose centers and sharpness train"


def upernet():
    """UperNet with the backbone `mhsa_resnet18`: a training step"""
    from transformers import UperNetConfig, UperNetForSemanticSegmentation

    sizes = {"hidden_size": 16, "auxiliary_channels": 16, "auxiliary_in_channels": 256}
    config = UperNetConfig(backbone_config=timm_backbone(1, 2, 3, 4), num_labels=3, **sizes)
    network = UperNetForSemanticSegmentation(config)
    trains(network, network(images(2, 64)).logits)


def maskformer():
    """MaskFormer with the backbone `mhsa_resnet18`: a training step"""
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation

    config = MaskFormerConfig(
        backbone_config=timm_backbone(1, 2, 3, 4),
        decoder_config=DetrConfig(**DETR).to_dict(),
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    network = MaskFormerForInstanceSegmentation(config)
    trains(network, network(images(2, 64)).masks_queries_logits)


def rt_detr():
    """RT-DETR with the backbone `mhsa_resnet18`: a training step"""
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    sizes = {"encoder_in_channels": [128, 256, 512], "encoder_hidden_dim": 32, "num_denoising": 0}
    sizes |= {"decoder_in_channels": [32, 32, 32]}
    config = RTDetrConfig(backbone_config=timm_backbone(2, 3, 4), **sizes, **DETR)
    network = RTDetrForObjectDetection(config)
    trains(network, network(images(2, 128)).logits)


def dpt():
    """DPT with a network of attention as the backbone (`SAConfig(reshape_hidden_states=False)`): a training step"""
    from transformers import DPTConfig, DPTForDepthEstimation

    from sa_zoo.models.configuration_sa import SAConfig

    tokens = {"image_size": 32, "patch_size": 4}
    maps = {"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    config = DPTConfig(
        backbone_config=SAConfig(num_hidden_layers=4, **SA, **tokens, **maps),
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


def hf_trainer():
    """`Trainer` with evaluation, `load_best_model_at_end` and `save_model`, then `from_pretrained`"""
    from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

    from sa_zoo.models.configuration_sa import SAConfig
    from sa_zoo.models.modeling_sa import SAForImageClassification

    network = SAForImageClassification(SAConfig(num_hidden_layers=2, num_labels=10, **SA))
    rows = [{"pixel_values": x, "labels": int(y)} for x, y in digits(22)]
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=4,
            eval_steps=2,
            save_steps=2,
            eval_strategy="steps",
            load_best_model_at_end=True,
            per_device_train_batch_size=11,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(network, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        loaded = AutoModelForImageClassification.from_pretrained(f"{folder}/saved").eval()
    assert torch.equal(loaded(images()).logits, network.eval()(images()).logits)
    return "works: equal logits"


def image_pipeline():
    """`pipeline("image-classification", "mhsa")` with a converted CNN, against timm"""
    from transformers import pipeline

    from sa_zoo.verbs.convert import convert_model

    pixels = images(1, 32)[0].permute(1, 2, 0).mul(40).add(128).clamp(0, 255)
    picture = Image.fromarray(pixels.byte().numpy())
    with TemporaryDirectory() as folder:
        where = f"{folder}/mhsa"
        convert_model("resnet_tiny_cifar", Path(where))
        scores = pipeline("image-classification", where, top_k=10)(picture)
        network = timm.create_model(f"local-dir:{where}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    logits = network(timm.data.create_transform(**config)(picture)[None])
    expected = logits.softmax(-1)[0].sort(descending=True).values
    assert near(torch.tensor([row["score"] for row in scores]), expected, 1e-4)
    return "works: the scores that timm gives"


def features():
    """`features_only=True`, with `out_indices`, for `mhsa_resnet18` and `sa_quadratic_tiny_cifar`"""
    maps = timm.create_model("mhsa_resnet18", features_only=True)(images())
    cnn = timm.create_model("resnet18", features_only=True)(images())
    assert [x.shape for x in maps] == [x.shape for x in cnn]
    network = timm.create_model(ATTENTION, features_only=True, out_indices=(1, 4))
    assert [x.shape for x in network(images())] == 2 * [(2, 96, 8, 8)]
    return "works: maps (B, C, H, W)"


def onnx_by_torchscript(dynamo: bool = False):
    """`timm.utils.onnx.onnx_export`, by TorchScript, its default"""
    from timm.utils.onnx import onnx_export

    network = timm.create_model(ATTENTION, exportable=True).eval()
    sizes = {"input_size": (3, 32, 32), "batch_size": 2}
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        where = f"{folder}/model.onnx"
        onnx_export(network, where, check_forward=True, use_dynamo=dynamo, **sizes)
    return "works: onnxruntime gives the same logits"


def onnx_by_dynamo():
    """`timm.utils.onnx.onnx_export(use_dynamo=True)`"""
    return onnx_by_torchscript(dynamo=True)


def label_names():
    """Class names in `pretrained_cfg`, from which timm's `inference.py --label-type name` takes them"""
    names = attention_network().pretrained_cfg["label_names"]
    assert len(names) == 10
    return f"works: {', '.join(names[:3])}, ..."


def grad_cam():
    """The example of this page, with `sa_quadratic_tiny_cifar` and `mhsa_resnet_tiny_cifar`"""
    for network, defined in examples("pytorch_grad_cam"):
        expected = expected_maps(network, defined["images"]).relu()
        expected = F.interpolate(scaled(expected)[:, None], (32, 32), mode="bilinear")[:, 0]
        assert near(torch.tensor(defined["maps"]), scaled(expected), 1e-4)
    return "works: the maps are those of the closed form"


def layer_grad_cam():
    """The example of this page, with `sa_quadratic_tiny_cifar` and `mhsa_resnet_tiny_cifar`"""
    for network, defined in examples("captum.attr"):
        assert near(defined["maps"][:, 0], expected_maps(network, defined["images"]), 1e-4)
    return "works: the maps are those of the closed form"


def examples(library: str):
    """Networks, and what the example of docs/usage.md that uses the library defines for each of them."""
    (example,) = [block for block in BLOCKS if library in block]
    for network in (attention_network(), timm.create_model("mhsa_resnet_tiny_cifar").eval()):
        defined: dict[str, Any] = {"torch": torch, "model": network, "images": images(3)}
        exec(example, defined)
        yield network, defined


def expected_maps(network: nn.Module, x: Tensor) -> Tensor:
    """Grad-CAM for the predicted classes, before its ReLU, in closed form: (B, H, W).

    Pooling is a mean and the head is linear, so what remains is each pixel's features times the weights of the class.
    """
    maps = network.forward_features(x).detach()
    if maps.shape[1] == network.num_features:  # (B, C, H, W)
        maps = maps.permute(0, 2, 3, 1)
    weights = network.get_classifier().weight.detach()[network(x).argmax(1)]
    return torch.einsum("bhwc,bc->bhw", maps, weights) / maps[0, :, :, 0].numel()


def scaled(maps: Tensor) -> Tensor:
    """Each map from 0 to 1."""
    maps = maps - maps.amin((1, 2), keepdim=True)
    return maps / maps.amax((1, 2), keepdim=True)


def fastai_learner():
    """`vision_learner(data, "sa_quadratic_tiny_cifar").fine_tune(4, 1e-2)`, on digits"""
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.vision.all import vision_learner

    data = DataLoaders(DataLoader(digits(320), bs=32, shuffle=True), DataLoader(digits(320), bs=32))
    loss = nn.CrossEntropyLoss()
    learner = vision_learner(data, ATTENTION, n_out=10, loss_func=loss, normalize=False)
    with learner.no_bar(), learner.no_logging():
        (before,) = learner.validate()
        learner.fine_tune(4, 1e-2)
        (after,) = learner.validate()
    assert after < 0.8 * before
    return "works: the loss falls by a fifth or more"


def lightning_trainer():
    """`Trainer(precision="bf16-mixed").fit`, a few steps of `sa_quadratic_tiny_cifar`"""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = attention_network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", precision="bf16-mixed", **quiet)
    trainer.fit(Classifier(), DataLoader(digits(21), 7))
    assert trainer.global_step == 3


def accelerate_launch():
    """`accelerate launch --mixed_precision bf16 -m sa_zoo train quickstart`"""
    with TemporaryDirectory() as folder:
        launch = "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1"
        small = "--set train.epochs=1 --set model.args={depth=1}"
        train = f"-m sa_zoo train quickstart {small} --out {folder}/run"
        options = f"{launch} --dynamo_backend no --mixed_precision bf16 {train}"
        done = subprocess.run([sys.executable, *options.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        recipe = tomllib.loads(Path(folder, "run", "train.toml").read_text())
    assert recipe["train"]["precision"] == "bf16"
    return "works: trains in bf16"


def torchao_int8():
    """`quantize_(model, Int8DynamicActivationInt8WeightConfig())`"""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    network = attention_network()
    expected = network(images(64))
    quantize_(network, Int8DynamicActivationInt8WeightConfig())
    assert near(network(images(64)), expected, 0.05)
    return "works: logits within 5 % of the largest"


def dynamic_int8():
    """`torch.ao.quantization.quantize_dynamic(model, {nn.Linear})`"""
    network = attention_network()
    quantized = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, torch.qint8)
    assert near(quantized(images(64)), network(images(64)), 0.1)
    return "works: logits within 10 % of the largest"


def symbolic_trace():
    """`torch.fx.symbolic_trace(model)`"""
    network = attention_network()
    assert near(torch.fx.symbolic_trace(network)(images()), network(images()), 1e-5)
    return "works: equal logits"


def feature_extractor():
    """`get_graph_node_names`, and `create_feature_extractor` for the last two blocks"""
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    network = attention_network()
    nodes, _ = get_graph_node_names(network)
    chosen = ["blocks.4", "blocks.5"]
    assert set(chosen) <= set(nodes)
    found = create_feature_extractor(network, chosen)(images())
    assert torch.equal(found["blocks.5"], network.forward_features(images()))


# The functions of each library, by the name of its distribution, in the order of the table
CLIENTS = {
    "timm": (features, label_names, onnx_by_torchscript, onnx_by_dynamo),
    "transformers": (
        hf_trainer,
        image_pipeline,
        detr,
        detr_converted,
        upernet,
        maskformer,
        rt_detr,
        dpt,
    ),
    "segmentation_models_pytorch": (decoders, decoder_of_one_size),
    "grad-cam": (grad_cam,),
    "captum": (layer_grad_cam,),
    "fastai": (fastai_learner,),
    "lightning": (lightning_trainer,),
    "accelerate": (accelerate_launch,),
    "torch": (symbolic_trace, dynamic_int8),
    "torchao": (torchao_int8,),
    "torchvision": (feature_extractor,),
}
FUNCTIONS = [(client, function) for client in CLIENTS for function in CLIENTS[client]]


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize(("client", "function"), FUNCTIONS)
def test_client(client, function, request):
    try:
        found = version(client).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{client} is not installed")
    torch.manual_seed(0)
    result = function() or "works"
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    row = rows[FUNCTIONS.index((client, function))]
    if request.config.getoption("record"):
        row |= {"client": client, "version": found, "done": function.__doc__, "result": result}
        TABLE.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    assert (row["client"], row["done"], row["result"]) == (client, function.__doc__, result)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(ATTENTION, {"depth": 3}), ("mhsa_resnet_tiny_cifar", {}), ("resnet_tiny_cifar", {})],
)
def test_the_examples_of_class_activation_maps_have_channels_first(name, sizes):
    """Without the libraries: Grad-CAM (Selvaraju et al. 2017) before its ReLU, as they compute it."""
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=7, **sizes).eval()
    last = network.get_submodule(network.feature_info[-1]["module"])
    channels_first = lambda x: x  # noqa: E731
    if getattr(network, "output_fmt", "NCHW") == "NHWC":
        channels_first = defined_by("pytorch_grad_cam")["channels_first"]
    wrapped = defined_by("captum")["ChannelsFirst"](network)
    x = images(3)
    for model, layer, transform in (
        (network, last, channels_first),
        (wrapped, wrapped.features, lambda x: x),
    ):
        kept = []
        handle = layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
        logits = model(x)
        handle.remove()
        (gradient,) = torch.autograd.grad(logits.amax(1).sum(), kept)
        weights = transform(gradient).mean((2, 3))
        maps = torch.einsum("bchw,bc->bhw", transform(kept[0]), weights)
        assert near(maps, expected_maps(network, x), 1e-5)


def defined_by(library: str) -> dict[str, Any]:
    """The functions and classes of the example that uses a library, which need not be installed."""
    (example,) = [block for block in BLOCKS if library in block]
    tree = ast.parse(example)
    tree.body = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined: dict[str, Any] = {"torch": torch}
    exec(compile(tree, "usage.md", "exec"), defined)
    return defined
