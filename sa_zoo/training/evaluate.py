"""One function computes every accuracy that is reported."""

import logging
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix
from torch import nn

from sa_zoo.folders.metrics import Metrics, Scores
from sa_zoo.folders.opened import Opened
from sa_zoo.training.config import DataConfig
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.model import InputFormat, input_format_of
from sa_zoo.training.sources import open_source
from sa_zoo.training.splits import Split, splits_of

_logger = logging.getLogger(__name__)

CALIBRATION_BINS = 15
MOST_CLASSES = 100  # of a confusion matrix; a larger one is neither stored nor read
BATCH_SIZE = 128


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    input_format: InputFormat,
    accelerator: Accelerator,
    batch_size: int = BATCH_SIZE,
    detail: bool = False,
) -> Scores:
    """The scores of a model on a split, whose every image counts exactly once, with any number of processes.

    `detail` adds accuracy per class, calibration error and curve (one point per bin of confidence that has images), and
    the confusion matrix (rows: true class). The model keeps its mode.
    """
    training = model.training
    model.eval()
    parts = []
    for images, labels, _ in accelerator.prepare(split.loader(batch_size)):
        logits = model(input_format.normalize(images)).float()
        confidence, top = logits.softmax(1).topk(min(5, logits.shape[1]))
        losses = F.cross_entropy(logits, labels, reduction="none")
        parts.append(accelerator.gather_for_metrics((losses, top, confidence[:, 0], labels)))
    model.train(training)
    loss, predicted, probability, true = (
        torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)
    )
    assert len(true) == len(split), "some images do not count exactly once"
    correct = predicted == true[:, None]  # (n, 5)
    return Scores(
        top1=float(correct[:, 0].mean()),
        top5=float(correct.any(1).mean()),
        loss=float(loss.mean(dtype=np.float64)),
        n=len(true),
        **(_detail(predicted[:, 0], probability, true, logits.shape[1]) if detail else {}),
    )


def _detail(
    predicted: np.ndarray, confidence: np.ndarray, labels: np.ndarray, classes: int
) -> dict[str, Any]:
    """Expected calibration error over equal bins of confidence (Guo et al. 2017, arXiv:1706.04599, Eq. 3)."""
    matrix = confusion_matrix(labels, predicted, labels=range(classes))
    accuracy, mean_confidence = calibration_curve(
        predicted == labels, confidence, n_bins=CALIBRATION_BINS
    )
    counts = np.histogram(confidence, CALIBRATION_BINS, (0, 1))[0]
    weights = counts[counts > 0] / len(labels)
    return {
        "per_class": [
            float(row[true] / row.sum()) if row.any() else None for true, row in enumerate(matrix)
        ],
        "calibration_error": float(weights @ np.abs(accuracy - mean_confidence)),
        "calibration_curve": {
            "confidence": mean_confidence.tolist(),
            "accuracy": accuracy.tolist(),
            "images": counts[counts > 0].tolist(),
        },
        "confusion_matrix": matrix.tolist() if classes <= MOST_CLASSES else None,
    }


def evaluate_opened(opened: Opened, data: DataConfig, detail: bool = False) -> Metrics:
    """Evaluate a model on the test split, in full precision. Raises ValueError if the numbers of classes differ."""
    accelerator = open_accelerator()
    name, split, input_format = open_test_split(opened.network, data, accelerator)
    network = opened.network.to(accelerator.device)
    test = evaluate(network, split, input_format, accelerator, detail=detail)
    network.cpu()  # where those who open a model expect it
    model = str(opened.folder or opened.source)
    return Metrics(model=model, data=name, data_revision=data.revision or None, test=test)


def open_test_split(
    network: nn.Module, data: DataConfig, accelerator: Accelerator
) -> tuple[str, Split, InputFormat]:
    """Name and test split of a data set, and the input format of the network that it is decoded for.

    Raises ValueError if model and data differ in their number of classes.
    """
    source = open_source(data)
    if network.num_classes != len(source.classes):
        raise ValueError(
            f"data: got {len(source.classes)} classes, expected {network.num_classes} as the model has"
        )
    named = getattr(network, "pretrained_cfg", {}).get("label_names") or source.classes
    for mine, given in zip(named, source.classes, strict=False):
        if mine != given:
            message = "data: classes are matched by number: the model's %s is %s in %s"
            _logger.warning(message, mine, given, source.name)
            break
    input_format = input_format_of(network, data.image_size)
    splits = splits_of(source, 0, input_format, accelerator.device, ["test"])
    return source.name, splits["test"], input_format
