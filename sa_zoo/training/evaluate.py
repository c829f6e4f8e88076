"""Evaluation: one function computes every reported accuracy."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.metrics import confusion_matrix
from torch import nn
from tqdm import tqdm

from sa_zoo.data.config import DataConfig
from sa_zoo.data.hold_out import rows_below
from sa_zoo.data.images import LabeledImages, digest_of
from sa_zoo.data.input_format import input_format_of
from sa_zoo.data.open_images import open_images
from sa_zoo.data.progress import on_terminal, say
from sa_zoo.data.splits import Split, splits_of
from sa_zoo.folders.messages import listed
from sa_zoo.folders.metrics import Metrics, Scores, margin
from sa_zoo.opened import Opened
from sa_zoo.training.device import open_accelerator, process_as_found

_logger = logging.getLogger(__name__)

MATRIX_CLASSES = 100  # at most; a larger confusion matrix is neither stored nor read
BATCH_SIZE = 128


@torch.no_grad()
def score(
    model: nn.Module,
    split: Split,
    accelerator: Accelerator,
    batch_size: int = BATCH_SIZE,
    detail: bool = False,
) -> Scores:
    """The scores of a model on a split. Each image counts exactly once, with any number of processes.

    `detail` adds accuracy per class and the confusion matrix (rows: true class). The model keeps its mode. A terminal
    shows progress.
    """
    training = model.training
    model.eval()
    parts = []
    batches = accelerator.prepare(split.loader(batch_size=batch_size))
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    bar = on_terminal()
    for batch in tqdm(batches, "evaluating", delay=1, leave=False, disable=not bar):
        pixels, labels, _ = (torch.as_tensor(x, device=accelerator.device) for x in batch)
        logits = model(split.input_format.normalize(pixels).to(dtype)).float()
        _, top = logits.topk(min(5, logits.shape[1]))
        losses = F.cross_entropy(logits, labels, reduction="none")
        parts.append(accelerator.gather_for_metrics((losses, top, labels)))
    model.train(training)
    loss, predicted, true = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    assert len(true) == len(split), "some images do not count exactly once"
    classes = logits.shape[1]
    correct = predicted == true[:, None]  # (n, 5)
    images = np.bincount(true, minlength=classes)
    accuracy = np.bincount(true[correct[:, 0]], minlength=classes) / np.maximum(images, 1)
    more: dict[str, Any] = {}
    if detail:
        more["images_per_class"] = images.tolist()
        more["per_class"] = [rate if n else None for rate, n in zip(accuracy, images, strict=True)]
        if classes <= MATRIX_CLASSES:
            matrix = confusion_matrix(true, predicted[:, 0], labels=range(classes))
            more["confusion_matrix"] = matrix.tolist()
    return Scores(
        top1=float(correct[:, 0].mean()),
        top5=float(correct.any(1).mean()) if classes > 5 else None,
        balanced=float(accuracy[images > 0].mean()),
        loss=float(loss.mean(dtype=np.float64)),
        n=len(true),
        **more,
    )


@process_as_found()
def evaluate_opened(opened: Opened, config: DataConfig, detail: bool = False) -> Metrics:
    """Evaluate a model in full precision; raises as `open_test_split` does. `detail` prints a table of the classes."""
    accelerator = open_accelerator()
    data, split = open_test_split(opened, config, accelerator)
    network = opened.network.to(accelerator.device)
    test = score(network, split, accelerator, detail=detail)
    text = f"top-1 {test}, balanced {test.balanced:.4f}"
    opened.network.cpu()  # as `open_model` returns it
    if detail:
        text += f"\n{class_table(test, data.classes)}"
    say(text)
    model = str(opened.folder or opened.source)
    return Metrics(model=model, data=data.name, data_revision=config.revision or None, test=test)


def class_table(scores: Scores, classes: Sequence[str]) -> str:
    """One line per class with images: its name, their number, and the accuracy on them."""
    assert scores.images_per_class and scores.per_class
    width = max(map(len, classes))
    rows = zip(classes, scores.images_per_class, scores.per_class, strict=True)
    return "\n".join(
        f"{name:{width}} {n:6} {right:.4f} ± {margin(right, n):.4f}"
        for name, n, right in rows
        if right is not None
    )


def open_test_split(
    opened: Opened, config: DataConfig, accelerator: Accelerator
) -> tuple[LabeledImages, Split]:
    """A data set with the classes of a model, and the images to evaluate the model on.

    These are the images of the test split. Without a test split, they are the images that the run of the model would
    have held out of training, in any data; or all images, if the run had a test split or is unknown. Raises ValueError
    if the classes do not fit.
    """
    source = open_images(config)
    data, how = _with_classes_of(opened.network, source)
    held_out = opened.metrics.held_out
    if "test" in data.labels:
        rows = {"test": ("test", np.arange(len(data.labels["test"])))}
        which = "its test split"
    elif held_out:
        rows = rows_below(data, held_out)
        which = "held out from training"
        if held_out.by == "name" and opened.metrics.data_digest != digest_of(source)["hash"]:
            which = (
                "whose names were held out from training; the data are not exactly those of the run, so images that "
                "were renamed since may be among them"
            )
    else:
        rows = {"test": ("train", np.arange(len(data.labels["train"])))}
        which = "all of them; nothing says whether the model was trained on some"
    input_format = input_format_of(opened.network, config.image_size)
    split = splits_of(data, rows, input_format, accelerator.device, config.workers)["test"]
    text = f"evaluated on {len(split)} images of {data.name}, {which}; classes matched {how}"
    say(text)
    return data, split


def _with_classes_of(network: nn.Module, source: LabeledImages) -> tuple[LabeledImages, str]:
    """The source with the classes of a model, matched by name, or by number if either has only numbers."""
    given = source.classes
    numbers = tuple(map(str, range(network.num_classes)))  # type: ignore[arg-type]
    names = tuple(getattr(network, "pretrained_cfg", {}).get("label_names") or ())
    if names == tuple(f"LABEL_{number}" for number in numbers):  # transformers' placeholders
        names = ()
    unknown = [name for name in given if name not in names]
    if names and not unknown:
        order = np.array([names.index(name) for name in given])
        labels = {split: order[own] for split, own in source.labels.items()}
        return replace(source, labels=labels, classes=names), "by name"
    has_names = names not in ((), numbers) and given != numbers[: len(given)]
    if has_names or len(given) != len(numbers):
        raise ValueError(
            f"data: got {len(given)} classes, expected {len(numbers)} that the model knows "
            f"({listed(names or numbers)}), not {listed(unknown)} in {source.name}"
        )
    if given != (names or numbers):
        pairs = [f"{mine} is {other}" for mine, other in zip(names or numbers, given, strict=False)]
        _logger.warning(
            "data: classes are matched by number, the model's with those of %s: %s",
            source.name,
            listed(pairs),
        )
    return source, "by number"
