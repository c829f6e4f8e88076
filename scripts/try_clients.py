"""python scripts/try_clients.py

Tries the models with the libraries that people use them with, small, on a CPU and offline. Writes docs/clients.json,
which scripts/render_docs.py renders into docs/usage.md. A client that does not work gets a row that says so. Besides
this package it needs

    pip install segmentation_models_pytorch grad-cam captum fastai lightning torchao

The suite tries those functions whose libraries it has (tests/test_clients.py).
"""

import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sa_zoo

ROOT = Path(__file__).parents[1]
USAGE = ROOT / "docs" / "usage.md"
ATTENTION = "sa_quadratic_tiny_cifar"  # its weights come with the package
DECODERS = (
    "Unet UnetPlusPlus MAnet Linknet FPN PSPNet PAN DeepLabV3 DeepLabV3Plus UPerNet Segformer DPT"
)
# Sizes of transformers' decoders
SMALL = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 31,
    "decoder_ffn_dim": 37,
    "num_queries": 5,
}


def attention_network() -> nn.Module:
    return timm.create_model(ATTENTION, pretrained=True).eval()


def images(number: int = 2, side: int = 32) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(0))


def digits(number: int) -> TensorDataset:
    """Handwritten digits as images (3, 32, 32)."""
    pixels, labels = load_digits(return_X_y=True)
    small = torch.tensor(pixels[:number], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(
        F.interpolate(small, (32, 32)).expand(-1, 3, -1, -1), torch.tensor(labels[:number])
    )


def has_gradients(network: nn.Module, output: Tensor) -> bool:
    """Whether each parameter of the backbone's convolutional attention gets a gradient."""
    output.square().sum().backward()
    kernels = [p for name, p in network.named_parameters() if name.endswith("W_val.weight")]
    return bool(kernels) and all(p.grad is not None for p in kernels)


def near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def check(holds: bool, failure: str) -> None:
    if not holds:
        raise ValueError(failure)


# segmentation_models_pytorch


def decoders() -> str:
    """Segmentation with `tu-mhsa_resnet18` as the encoder: a training step with each decoder"""
    import segmentation_models_pytorch as smp

    for decoder in DECODERS.split():
        network = getattr(smp, decoder)("tu-mhsa_resnet18", encoder_weights=None, classes=2)
        masks = network(images(2, 128))
        check(masks.shape == (2, 2, 128, 128), f"{decoder} returns {tuple(masks.shape)}")
        check(has_gradients(network, masks), f"{decoder} leaves kernels without a gradient")
    return f"works with {', '.join(DECODERS.split())}"


def decoder_of_one_size() -> str:
    """Segmentation with `tu-sa_quadratic_tiny_cifar` as the encoder of a Unet"""
    import segmentation_models_pytorch as smp

    masks = smp.Unet(f"tu-{ATTENTION}", encoder_weights=None, classes=2)(images())
    return f"works: {tuple(masks.shape)}"


# transformers


def timm_backbone(*levels: int) -> Any:
    from transformers import TimmBackboneConfig

    return TimmBackboneConfig(backbone="mhsa_resnet18", out_indices=list(levels))


def detr() -> str:
    """DETR with the backbone `mhsa_resnet18`: a training step"""
    from transformers import DetrConfig, DetrForObjectDetection

    network = DetrForObjectDetection(DetrConfig(backbone_config=timm_backbone(1, 2, 3, 4), **SMALL))
    check(has_gradients(network, network(images(2, 64)).logits), "no gradient reaches the backbone")
    return "works"


def detr_converted() -> str:
    """`sa_zoo.convert(detr, layers="*layer4*", alpha=4.0)`: a training step"""
    from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig

    backbone = TimmBackboneConfig(backbone="resnet18", out_indices=[1, 2, 3, 4])
    network = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **SMALL))
    network, report = sa_zoo.convert(network, layers="*layer4*", alpha=4.0)
    check(
        has_gradients(network, network(images(2, 64)).logits), "no gradient reaches the attention"
    )
    check(all(row.alpha == 4.0 for row in report.layers), "another alpha")
    return f"works: {len(report.layers)} layers are attention whose centers and sharpness train"


def upernet() -> str:
    """UperNet with the backbone `mhsa_resnet18`: a training step"""
    from transformers import UperNetConfig, UperNetForSemanticSegmentation

    sizes = {"hidden_size": 16, "auxiliary_channels": 16, "auxiliary_in_channels": 256}
    config = UperNetConfig(backbone_config=timm_backbone(1, 2, 3, 4), num_labels=3, **sizes)
    network = UperNetForSemanticSegmentation(config)
    check(has_gradients(network, network(images(2, 64)).logits), "no gradient reaches the backbone")
    return "works"


def maskformer() -> str:
    """MaskFormer with the backbone `mhsa_resnet18`: a training step"""
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation

    config = MaskFormerConfig(
        backbone_config=timm_backbone(1, 2, 3, 4),
        decoder_config=DetrConfig(**SMALL).to_dict(),
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    network = MaskFormerForInstanceSegmentation(config)
    masks = network(images(2, 64)).masks_queries_logits
    check(has_gradients(network, masks), "no gradient reaches the backbone")
    return "works"


def rt_detr() -> str:
    """RT-DETR with the backbone `mhsa_resnet18`: a training step"""
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    config = RTDetrConfig(
        backbone_config=timm_backbone(2, 3, 4),
        encoder_in_channels=[128, 256, 512],
        encoder_hidden_dim=32,
        decoder_in_channels=[32, 32, 32],
        num_denoising=0,
        **SMALL,
    )
    network = RTDetrForObjectDetection(config)
    check(
        has_gradients(network, network(images(2, 128)).logits), "no gradient reaches the backbone"
    )
    return "works"


def dpt() -> str:
    """DPT with a network of attention as the backbone (`SAConfig(reshape_hidden_states=False)`): a training step"""
    from transformers import DPTConfig, DPTForDepthEstimation

    from sa_zoo.models.configuration_sa import SAConfig

    backbone = SAConfig(
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=17,
        image_size=32,
        patch_size=4,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    config = DPTConfig(
        backbone_config=backbone,
        hidden_size=24,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        patch_size=4,
        image_size=32,
        is_hybrid=False,
        readout_type="ignore",
    )
    network = DPTForDepthEstimation(config)
    depth = network(images()).predicted_depth
    check(has_gradients(network, depth), "no gradient reaches the backbone")
    return f"works: a map of {depth.shape[1]}x{depth.shape[2]}"


def hf_trainer() -> str:
    """`Trainer` with evaluation, `load_best_model_at_end` and `save_model`, then `from_pretrained`"""
    from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

    from sa_zoo.models.configuration_sa import SAConfig
    from sa_zoo.models.modeling_sa import SAForImageClassification

    config = SAConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        num_labels=10,
    )
    network = SAForImageClassification(config)
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
    same = torch.equal(loaded(images()).logits, network.eval()(images()).logits)
    check(same, "the saved model has other logits")
    return "works: equal logits"


def image_pipeline() -> str:
    """`pipeline("image-classification", "mhsa")` with a converted CNN, against timm"""
    from transformers import pipeline

    from sa_zoo.verbs.convert import convert

    with TemporaryDirectory() as folder:
        where = f"{folder}/mhsa"
        convert("resnet_tiny_cifar", Path(where))
        picture = Image.fromarray(
            images(1, 32)[0].permute(1, 2, 0).mul(40).add(128).clamp(0, 255).byte().numpy()
        )
        scores = pipeline("image-classification", where, top_k=10)(picture)
        network = timm.create_model(f"local-dir:{where}", pretrained=True).eval()
        pixels = timm.data.create_transform(**timm.data.resolve_model_data_config(network))(
            picture
        )[None]
    expected = network(pixels).softmax(-1)[0].sort(descending=True).values
    check(near(torch.tensor([row["score"] for row in scores]), expected, 1e-4), "other scores")
    return "works: the scores that timm gives"


# timm


def features() -> str:
    """`features_only=True`, with `out_indices`, for `mhsa_resnet18` and `sa_quadratic_tiny_cifar`"""
    maps = timm.create_model("mhsa_resnet18", features_only=True)(images())
    cnn = timm.create_model("resnet18", features_only=True)(images())
    check([x.shape for x in maps] == [x.shape for x in cnn], "other shapes than resnet18's")
    network = timm.create_model(ATTENTION, features_only=True, out_indices=(1, 4))
    check(
        [x.shape for x in network(images())] == 2 * [(2, 96, 8, 8)],
        "other shapes than (B, C, H, W)",
    )
    return "works: maps (B, C, H, W)"


def onnx_by(dynamo: bool) -> str:
    from timm.utils.onnx import onnx_export

    network = timm.create_model(ATTENTION, exportable=True).eval()
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        where = f"{folder}/model.onnx"
        onnx_export(
            network,
            where,
            input_size=(3, 32, 32),
            batch_size=2,
            check_forward=True,
            use_dynamo=dynamo,
        )
    return "works: onnxruntime gives the same logits"


def onnx_by_torchscript() -> str:
    """`timm.utils.onnx.onnx_export`, by TorchScript, its default"""
    return onnx_by(dynamo=False)


def onnx_by_dynamo() -> str:
    """`timm.utils.onnx.onnx_export(use_dynamo=True)`"""
    return onnx_by(dynamo=True)


def label_names() -> str:
    """Class names in `pretrained_cfg`, from which timm's `inference.py --label-type name` takes them"""
    names = attention_network().pretrained_cfg.get("label_names")
    check(names is not None and len(names) == 10, f"label_names: got {names}, expected ten")
    return f"works: {', '.join(names[:3])}, ..."


# Class activation maps


def grad_cam() -> str:
    """The example of this page, with `sa_quadratic_tiny_cifar` and `mhsa_resnet_tiny_cifar`"""
    for network, defined in networks_of_the_example("pytorch_grad_cam"):
        expected = expected_maps(network, defined["images"]).relu()
        expected = F.interpolate(scaled(expected)[:, None], (32, 32), mode="bilinear")[:, 0]
        check(
            near(torch.tensor(defined["maps"]), scaled(expected), 1e-4),
            "other maps than the closed form",
        )
    return "works: the maps are those of the closed form"


def layer_grad_cam() -> str:
    """The example of this page, with `sa_quadratic_tiny_cifar` and `mhsa_resnet_tiny_cifar`"""
    for network, defined in networks_of_the_example("captum.attr"):
        expected = expected_maps(network, defined["images"])
        check(near(defined["maps"][:, 0], expected, 1e-4), "other maps than the closed form")
    return "works: the maps are those of the closed form"


def networks_of_the_example(library: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """The networks, and what the example of docs/usage.md that uses the library defines for each of them."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", USAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (example,) = [block for block in blocks if library in block]
    for network in (attention_network(), timm.create_model("mhsa_resnet_tiny_cifar").eval()):
        defined: dict[str, Any] = {"torch": torch, "model": network, "images": images(3)}
        exec(example, defined)
        yield network, defined


def expected_maps(network: nn.Module, x: Tensor) -> Tensor:
    """Grad-CAM for the predicted classes, before its ReLU, in closed form: (B, H, W).

    Pooling is a mean and the head is linear, so what remains is each pixel's features times the weights of the class.
    """
    features = network.forward_features(x).detach()
    if features.shape[1] == network.num_features:  # (B, C, H, W)
        features = features.permute(0, 2, 3, 1)
    weights = network.get_classifier().weight.detach()[network(x).argmax(1)]
    return torch.einsum("bhwc,bc->bhw", features, weights) / features[0, :, :, 0].numel()


def scaled(maps: Tensor) -> Tensor:
    """Each map from 0 to 1."""
    maps = maps - maps.amin((1, 2), keepdim=True)
    return maps / maps.amax((1, 2), keepdim=True)


# Training


def fastai_learner() -> str:
    """`vision_learner(data, "sa_quadratic_tiny_cifar").fine_tune(4, 1e-2)`, on digits"""
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.vision.all import vision_learner

    data = DataLoaders(DataLoader(digits(320), bs=32, shuffle=True), DataLoader(digits(320), bs=32))
    learner = vision_learner(
        data, ATTENTION, n_out=10, loss_func=nn.CrossEntropyLoss(), normalize=False
    )
    with learner.no_bar(), learner.no_logging():
        (before,) = learner.validate()
        learner.fine_tune(4, 1e-2)
        (after,) = learner.validate()
    check(after < 0.8 * before, f"the loss goes from {before:.2f} to {after:.2f} only")
    return "works: the loss falls by a fifth or more"


def lightning_trainer() -> str:
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
    with TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", precision="bf16-mixed", default_root_dir=folder, **quiet
        )
        trainer.fit(Classifier(), DataLoader(digits(21), 7))
    check(trainer.global_step == 3, f"{trainer.global_step} steps")
    return "works"


def accelerate_launch() -> str:
    """`accelerate launch --mixed_precision bf16 -m sa_zoo train quickstart`"""
    with TemporaryDirectory() as folder:
        launch = "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --dynamo_backend no"
        small = "--set train.epochs=1 --set model.args={depth=1}"
        train = f"-m sa_zoo train quickstart {small} --out {folder}/run"
        command = [sys.executable, *f"{launch} --mixed_precision bf16 {train}".split()]
        done = subprocess.run(command, capture_output=True, text=True)
        check(done.returncode == 0, done.stderr[-500:])
        recipe = tomllib.loads(Path(folder, "run", "train.toml").read_text())
    precision = recipe["train"]["precision"]
    check(precision == "bf16", f"trains in {precision}, as the recipe says, without a warning")
    return "works: trains in bf16"


# Quantization and graphs


def torchao_int8() -> str:
    """`quantize_(model, Int8DynamicActivationInt8WeightConfig())`"""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    network = attention_network()
    expected = network(images(64))
    quantize_(network, Int8DynamicActivationInt8WeightConfig())
    check(
        near(network(images(64)), expected, 0.05), "logits differ by more than 5 % of the largest"
    )
    return "works: logits within 5 % of the largest"


def dynamic_int8() -> str:
    """`torch.ao.quantization.quantize_dynamic(model, {nn.Linear})`"""
    network = attention_network()
    expected = network(images(64))
    quantized = torch.ao.quantization.quantize_dynamic(network, {nn.Linear}, torch.qint8)
    check(
        near(quantized(images(64)), expected, 0.1), "logits differ by more than 10 % of the largest"
    )
    return "works: logits within 10 % of the largest"


def symbolic_trace() -> str:
    """`torch.fx.symbolic_trace(model)`"""
    network = attention_network()
    traced = torch.fx.symbolic_trace(network)
    check(near(traced(images()), network(images()), 1e-5), "other logits")
    return "works: equal logits"


def feature_extractor() -> str:
    """`get_graph_node_names`, and `create_feature_extractor` for the last two blocks"""
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    network = attention_network()
    nodes, _ = get_graph_node_names(network)
    chosen = ["blocks.4", "blocks.5"]
    check(set(chosen) <= set(nodes), f"the nodes are {nodes}")
    features = create_feature_extractor(network, chosen)(images())
    check(torch.equal(features["blocks.5"], network.forward_features(images())), "other features")
    return "works"


# The functions of each library, by the name of its distribution
CLIENTS: dict[str, tuple[Callable[[], str], ...]] = {
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


def tried(client: str, function: Callable[[], str]) -> dict[str, str]:
    """A row of the table."""
    torch.manual_seed(0)
    assert function.__doc__
    try:
        result = function()
    except Exception as error:  # what a library of others raises has no bounds
        first, *_ = str(error).splitlines() or [""]
        result = f"**does not work**: {type(error).__name__}: {first[:200]}"
    print(f"{client}: {function.__name__}: {result}", flush=True)
    return {
        "client": client,
        "version": version(client).partition("+")[0],
        "done": function.__doc__,
        "result": result,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [
        tried(client, function) for client, functions in CLIENTS.items() for function in functions
    ]
    (ROOT / "docs" / "clients.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
