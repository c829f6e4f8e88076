"""Probabilities that depend on positions only are the same in every call of a network that does not train."""

from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sa_zoo.kernels.portions import in_portions
from sa_zoo.models.attention import Attention


@dataclass
class Remembered:
    """P of a layer, and what it was computed from."""

    size: torch.Size
    parameters: list[Tensor]
    P: Tensor


_LAST: WeakKeyDictionary[Attention, Remembered] = WeakKeyDictionary()


def remembered(attention: Attention, X: Tensor) -> Tensor:
    """The layer with the P of the call before, if neither its parameters nor the size of X have changed."""
    parameters, size = list(attention.terms.parameters()), X.shape[1:3]
    last = _LAST.get(attention)
    if last is None or last.size != size or not _equal(last.parameters, parameters):
        P = attention.probabilities(X)
        last = _LAST[attention] = Remembered(size, [parameter.detach().clone() for parameter in parameters], P)
    return in_portions(partial(attention.values, last.P), X)


def _equal(known: list[Tensor], given: list[Tensor]) -> bool:
    """Whether the numbers are equal, not their versions: a write through `.data` changes no version."""
    return len(known) == len(given) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in zip(known, given, strict=True)
    )
