"""Where numbers stop being finite: the first module whose output, or parameter whose gradient, is not."""

from functools import partial
from typing import Any

from torch import Tensor, nn


def watch(model: nn.Module) -> list[str]:
    """A list that fills, in the order of computation, with what is not finite in later passes through the model."""
    found: list[str] = []

    def note(what: str, *values: Any) -> None:
        if isinstance(values[-1], Tensor) and not values[-1].isfinite().all():
            found.append(what)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, f"the output of {name or 'the model'}"))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(note, f"the gradient of {name}"))
    return found
