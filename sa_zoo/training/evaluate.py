"""One function computes every accuracy that is reported."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sa_zoo.metrics import Metrics, Scores
from sa_zoo.model_folder import load_model
from sa_zoo.training.config import DataConfig
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.model import InputFormat, input_format_of
from sa_zoo.training.sources import open_source
from sa_zoo.training.splits import evaluation_split

CALIBRATION_BINS = 15
BATCH_SIZE = 128


def evaluate(
    model: nn.Module, loader: DataLoader, input_format: InputFormat, accelerator: Accelerator, detail: bool = False
) -> Scores:
    """The scores of a model on a split.

    The loader is one that the accelerator prepared over the whole split; every image counts exactly once, with any
    number of processes. `detail` adds accuracy per class, calibration error and curve, and the confusion matrix
    (rows: true class). The model keeps its mode, training or evaluation.
    """
    training = model.training
    model.eval()
    parts = [_scored(model, images, labels, input_format, accelerator) for images, labels, _ in loader]
    model.train(training)
    losses, top, confidence, labels = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    images = len(loader.dataset)  # type: ignore[arg-type]
    assert len(labels) == images, f"counted {len(labels)} images of {images}"
    correct = top == labels[:, None]  # (n, 5)
    return Scores(
        top1=float(correct[:, 0].mean()),
        top5=float(correct.any(1).mean()),
        loss=float(losses.mean(dtype=np.float64)),
        n=len(labels),
        **(_detail(top[:, 0], confidence, labels, model.num_classes) if detail else {}),
    )


@torch.no_grad()
def _scored(
    model: nn.Module, images: Tensor, labels: Tensor, input_format: InputFormat, accelerator: Accelerator
) -> tuple:
    """Per image of all processes: loss, the five most probable classes, probability of the first, label."""
    logits = model(input_format.normalize(images)).float()
    confidence, top = logits.softmax(1).topk(min(5, logits.shape[1]))
    losses = F.cross_entropy(logits, labels, reduction="none")
    return accelerator.gather_for_metrics((losses, top, confidence[:, 0], labels))


def _detail(predicted: np.ndarray, confidence: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, Any]:
    """Expected calibration error over equal bins of confidence (Guo et al. 2017, arXiv:1706.04599, Eq. 3)."""
    correct = predicted == labels
    matrix = confusion_matrix(labels, predicted, labels=range(classes))
    accuracy, mean_confidence = calibration_curve(correct, confidence, n_bins=CALIBRATION_BINS)
    counts = np.histogram(confidence, CALIBRATION_BINS, (0, 1))[0]
    weights = counts[counts > 0] / len(labels)
    return {
        "per_class": [float(row[true] / row.sum()) if row.any() else None for true, row in enumerate(matrix)],
        "calibration_error": float(weights @ np.abs(accuracy - mean_confidence)),
        "calibration_curve": {"confidence": mean_confidence.tolist(), "accuracy": accuracy.tolist()},
        "confusion_matrix": matrix.tolist(),
    }


def evaluate_source(model: str, data: DataConfig, detail: bool = False) -> Metrics:
    """Evaluate a model folder or a name on the test split of a data set, in full precision.

    Raises ValueError if model and data differ in their number of classes.
    """
    accelerator = open_accelerator()
    source = open_source(data)
    network = load_model(model).to(accelerator.device)
    if network.num_classes != len(source.classes):
        raise ValueError(f"data: got {len(source.classes)} classes, expected {network.num_classes} as {model} has")
    input_format = input_format_of(network, data.image_size)
    split = evaluation_split(source, input_format, accelerator.device)
    loader = accelerator.prepare(split.loader(BATCH_SIZE))
    test = evaluate(network, loader, input_format, accelerator, detail)
    return Metrics(model=model, data=source.name, test=test)
