"""Every model of sa_zoo for PyTorch Hub, by its timm name: torch.hub.load("OWNER/sa_zoo", "sa_quadratic_cifar").

Arguments are those of timm.create_model.
"""

from collections.abc import Callable as _Callable
from functools import partial as _partial
from typing import Any as _Any

import timm as _timm

import sa_zoo as _sa_zoo  # noqa: F401  registers the names

dependencies = ["torch", "torchvision", "timm", "wrapt"]


def __dir__() -> list[str]:
    models = [
        name
        for module in ("timm_models", "timm_backbones")
        for name in _timm.list_models(module=module, include_tags=True)
    ]
    return ["dependencies", *models]


def __getattr__(name: str) -> _Callable[..., _Any]:
    if not _timm.is_model(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _partial(_timm.create_model, name)
