"""Writes a network as one ONNX file, to run without this package and without torch."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch
from onnxruntime import InferenceSession
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from timm.utils.onnx import onnx_export

from sa_zoo.folders.check import refusing
from sa_zoo.folders.write import write_file
from sa_zoo.opened import Opened

TOLERANCE = 1e-4  # of a logit, relative to the largest one


def write_onnx(opened: Opened, path: Path, dynamic_size: bool = False) -> Path:
    """Write the network in evaluation mode, with its weights, for any number of images.

    dynamic_size: also for all image sizes of the network.

    The input is `images` (B, C, H, W), normalized float32, the output `logits` (B, classes). The metadata hold the
    preprocessing (input_size, interpolation, crop_pct, mean, std) and the class names, as JSON. The file is written
    after a check of its logits in onnxruntime. Raises ValueError if they differ, and for a dynamic size if the network
    takes one size only.
    """
    network: Any = opened.network.eval()
    data = resolve_model_data_config(network)
    channels, height, width = data["input_size"]
    batches = [torch.randn(count, channels, height, width) for count in (1, 3)]
    if dynamic_size:
        step = network.feature_info[-1]["reduction"]
        batches.append(torch.randn(2, channels, height + step, width + 2 * step))
    else:  # folds constants of one size
        network = reparameterize_model(network)
    with torch.inference_mode(), refusing(opened.source):  # a network of one size raises anything
        expected = [network(images) for images in batches]
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.onnx"
        onnx_export(
            network,
            str(file),
            input_size=data["input_size"],
            batch_size=2,
            dynamic_size=dynamic_size,
            use_dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
        )
        model = onnx.load(file)
    facts = data | {"label_names": network.pretrained_cfg.get("label_names")}
    onnx.helper.set_model_props(model, {key: json.dumps(facts[key]) for key in facts})
    content = model.SerializeToString()
    session = InferenceSession(content, providers=["CPUExecutionProvider"])
    for images, right in zip(batches, expected, strict=True):
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        difference = (torch.from_numpy(logits) - right).abs().max()
        if not difference <= TOLERANCE * right.abs().max():
            raise ValueError(
                f"export: got logits that differ by {difference:.1e} from onnxruntime, expected the network's"
            )
    return write_file(path, content)
