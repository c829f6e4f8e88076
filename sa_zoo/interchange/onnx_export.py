"""Writes a network as one ONNX file, which runs without this package and without torch."""

import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from timm.utils.onnx import onnx_export

from sa_zoo.folders.opened import Opened
from sa_zoo.folders.write import write_file

TOLERANCE = 1e-4  # of a logit, relative to the largest one


def write_onnx(opened: Opened, path: Path) -> Path:
    """Write the network in evaluation mode, with its weights, for any number of images.

    The input is `images` (B, C, H, W), normalized float32, the output `logits` (B, classes). The metadata hold what the
    network expects of images (input_size, interpolation, crop_pct, mean, std) and the names of the classes, as JSON.
    The file is written once onnxruntime gives the network's logits. Raises ValueError if it does not, or is missing.
    """
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        raise ValueError("export: got no onnxruntime, expected it: pip install 'sa_zoo[onnx]'")
    import onnx  # optional

    network: Any = reparameterize_model(opened.network)
    data = resolve_model_data_config(network)
    names = opened.config.get("label_names") or network.pretrained_cfg.get("label_names")
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.onnx"
        onnx_export(
            network,
            str(file),
            input_size=data["input_size"],
            batch_size=2,
            use_dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
        )
        model = onnx.load(file)
        facts = data | {"label_names": names}
        onnx.helper.set_model_props(model, {key: json.dumps(facts[key]) for key in facts})
        content = model.SerializeToString()
    _check(content, network, torch.randn(3, *data["input_size"]))
    return write_file(path, content)


def _check(content: bytes, network: Any, images: torch.Tensor) -> None:
    """Raise ValueError unless onnxruntime gives the network's logits for images (B, C, H, W)."""
    from onnxruntime import InferenceSession

    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    with torch.inference_mode():
        expected = network(images)
    difference = float((torch.from_numpy(logits) - expected).abs().max())
    if not difference <= TOLERANCE * float(expected.abs().max()):
        raise ValueError(
            f"export: got logits that differ by {difference:.1e} from onnxruntime, expected the network's"
        )
