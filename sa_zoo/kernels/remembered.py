"""Probabilities that depend on positions only are the same in every call of a network that does not train."""

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sa_zoo.kernels.portions import in_portions
from sa_zoo.models.attention import Attention


@dataclass
class Remembered:
    """P of a layer, or its factors, and what they were computed from."""

    occasion: tuple[str, torch.Size]
    parameters: list[Tensor]
    value: Any


_LAST: WeakKeyDictionary[Attention, Remembered] = WeakKeyDictionary()


def remembered(attention: Attention, X: Tensor) -> Tensor:
    """The layer with the P of the call before."""
    return in_portions(partial(attention.values, recall(attention, "probabilities", X)), X)


def recall(attention: Attention, name: str, X: Tensor) -> Any:
    """The method `name` of X, as in the call before if neither the layer's terms nor the size of X have changed."""
    if torch.compiler.is_compiling():  # a graph cannot remember
        return getattr(attention, name)(X)
    parameters, occasion = (
        [*attention.terms.parameters(), *attention.terms.buffers()],
        (name, X.shape[1:3]),
    )
    last = _LAST.get(attention)
    if last is None or last.occasion != occasion or not equal(last.parameters, parameters):
        copies = [parameter.detach().clone() for parameter in parameters]
        last = _LAST[attention] = Remembered(occasion, copies, getattr(attention, name)(X))
    return last.value


def equal(known: list[Tensor], given: list[Tensor]) -> bool:
    """Whether the numbers are equal, not their versions: a write through `.data` changes no version."""
    return len(known) == len(given) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(known, given, strict=True)
    )
