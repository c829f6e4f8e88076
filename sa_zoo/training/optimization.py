"""The optimizer of a run and its learning rate."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from timm.optim import create_optimizer_v2, list_optimizers, muon
from torch import nn

from sa_zoo.folders.messages import did_you_mean
from sa_zoo.training.config import OptimConfig
from sa_zoo.training.device import computes_in_bf16


def learning_rate_factor(seen: int, batch: int, total: int, optim: OptimConfig) -> float:
    """Fraction of the maximum learning rate for the step from `seen` to `seen + batch` of `total` images.

    Linear warmup, above zero from the first step; then half a cosine or a line to zero.
    """
    rising = optim.warmup * total
    if seen < rising:
        return min(1.0, (seen + batch) / rising)
    falling = (seen - rising) / (total - rising)
    if optim.schedule == "linear":
        return 1 - falling
    return 0.5 * (1 + math.cos(math.pi * falling))


def check_optimizer(name: str) -> None:
    """Raise ValueError for a name unknown to timm."""
    known = [str(each) for each in list_optimizers()]
    if name not in known:
        raise ValueError(
            f"optim.name: got {name}, expected a timm optimizer{did_you_mean(name, known)}"
        )


def optimizer_of(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """timm's optimizer, without weight decay on biases, norms and the parameters in `model.no_weight_decay()`."""
    settings = optim.model_dump(include={"lr", "momentum", "weight_decay"})
    if optim.layer_decay < 1:
        settings["layer_decay"] = optim.layer_decay
    try:
        return create_optimizer_v2(model, opt=optim.name, **settings, **optim.args)
    except (AssertionError, TypeError) as error:
        raise ValueError(
            f"optim.args: got {optim.args}, which timm's {optim.name} does not accept: {error}"
        ) from error


@contextmanager
def fast_muon() -> Iterator[None]:
    """Let timm's Muon orthogonalize in float32 where bfloat16, for which timm has no option, is emulated."""
    orthogonalize = muon.zeropower_via_newtonschulz
    if not computes_in_bf16():
        muon.zeropower_via_newtonschulz = partial(orthogonalize, dtype=torch.float32)
    try:
        yield
    finally:
        muon.zeropower_via_newtonschulz = orthogonalize
