"""Every model of sa_zoo for PyTorch Hub, by its timm name: torch.hub.load("OWNER/sa_zoo", "sa_quadratic_cifar").

A name with a tag, such as "sa_quadratic_tiny_cifar.long", names a set of weights. Arguments are those of
timm.create_model.
"""

import functools as _functools

import timm as _timm

import sa_zoo.convolution.timm_backbones as _timm_backbones
import sa_zoo.models.timm_models as _timm_models

dependencies = ["torch", "torchvision", "timm", "wrapt"]

for _module in (_timm_models, _timm_backbones):
    for _name in _timm.list_models(module=_module.__name__.rpartition(".")[2], include_tags=True):
        globals()[_name] = _functools.partial(_timm.create_model, _name)
