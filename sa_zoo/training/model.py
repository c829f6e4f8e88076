"""The model of a run, by its timm name: built, initialized, frozen. Independent of the architecture."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models import PretrainedCfg, is_model, is_model_pretrained, resolve_model_input_args
from torch import Tensor, nn

from sa_zoo.convolution.harden import harden
from sa_zoo.convolution.timm_backbones import backbone_cfg
from sa_zoo.cost import training_macs
from sa_zoo.data.input_format import InputFormat, Size, input_format_of
from sa_zoo.data.shared import shared
from sa_zoo.folders.check import check_name, checked
from sa_zoo.models.network import terms_in
from sa_zoo.models.terms import Term
from sa_zoo.opened import build_model
from sa_zoo.training.augment import image_size
from sa_zoo.training.config import Config, ModelConfig

PRETRAINED = "pretrained"  # as model.init: the weights that timm has for model.name


def check_start(config: ModelConfig) -> None:
    """Raise ValueError or FileNotFoundError unless the name and the initial weights exist. Needs no data.

    Weights that are not on this machine yet are downloaded later.
    """
    with checked(_source(config)):
        pass


def create_model(config: ModelConfig, classes: int, image_size: int = 0) -> nn.Module:
    """The model of a config, with its initial weights and its frozen parameters.

    A new classifier on initial weights starts at zero. Heads on one pixel stay there: their gradient is zero, and
    layers run as taps if positions are fixed. Raises ValueError for an unfit name, argument or regular expression, and
    the errors of `build_model`.
    """
    with checked(_source(config)) as source:
        sizes = {"img_size": image_size or None}
        args = resolve_model_input_args(source, sizes, **config.args, num_classes=classes)
        name = config.name.partition(".")[0]
        cnn = args["model_name"]
        of_network = name == "mhsa_network" and cnn == args.get("cnn")
        if of_network or name == f"mhsa_{cnn}":  # its convolutions become attention when loaded
            cfg = backbone_cfg(PretrainedCfg(**args["pretrained_cfg"]))
            args |= {"model_name": name, "pretrained_cfg": cfg}
        if args["model_name"] != name:
            raise ValueError(
                f"model.init: got weights of {args['model_name']} in {source}, expected {config.name}"
            )
        if config.init and is_model(source):
            # timm finds the weights by name
            args |= {"model_name": source, "pretrained_cfg": None}
        try:
            model = build_model(source, pretrained=bool(config.init), **args)
        except ValueError as error:
            if config.init != PRETRAINED or not isinstance(error.__cause__, OSError):
                raise
            raise FileNotFoundError(
                f"model.init: got {PRETRAINED}, but the weights of {config.name} are not on this machine and cannot be "
                f"downloaded ({error.__cause__}); expected a network connection, or a folder with weights"
            ) from error
    loaded: Any = model.pretrained_cfg
    if not config.init:
        loaded.pop("license", None)  # that of timm's own weights
    if config.init and loaded["num_classes"] != classes:
        for parameter in classifier_parameters(model):  # random logits would disturb the features
            nn.init.zeros_(parameter)
    _start_as_kernels(model, config)
    if config.harden:
        harden(model)
    for module in model.modules():
        if isinstance(module, Term) and module.taps():
            module.requires_grad_(False)
    if config.freeze:
        _freeze(model, config.freeze)
    return model


def _source(config: ModelConfig) -> str:
    """The source for timm: the initial weights, or the name of the model."""
    check_name(config.name)
    if config.init in ("", PRETRAINED):
        return config.name
    if Path(config.init).is_dir():
        return f"local-dir:{config.init}"
    if ":" not in config.init and not is_model_pretrained(config.init):
        raise FileNotFoundError(
            f"model.init: got {config.init}, expected a folder, hf-hub:OWNER/NAME or a timm name with weights"
        )
    return config.init


def _start_as_kernels(model: nn.Module, config: ModelConfig) -> None:
    blocks = list(getattr(model, "blocks", []))[: config.kernels]
    terms: list[Any] = [term for block in blocks for term in terms_in(block).values()]
    if len(terms) < config.kernels or not all(hasattr(term, "start_as_kernel") for term in terms):
        raise ValueError(
            f"model.kernels: got {config.kernels} for {config.name}, expected at most its number of "
            "blocks with quadratic, learned or content heads"
        )
    for term in terms:
        term.start_as_kernel()


def _freeze(model: nn.Module, pattern: str) -> None:
    parameters = dict(model.named_parameters())
    frozen = [name for name in parameters if re.search(pattern, name)]
    if len(frozen) in (0, len(parameters)):
        raise ValueError(
            f"model.freeze: got {pattern!r}, which matches {len(frozen)} of {len(parameters)} parameters"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


def frozen_norms(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Modules with running statistics and frozen parameters; those without parameters match by their statistics."""
    found = []
    for path, module in model.named_modules():
        if pattern and hasattr(module, "running_mean"):
            names = [name for name, _ in module.named_parameters(path)] or [f"{path}.running_mean"]
            if all(re.search(pattern, name) for name in names):
                found.append(module)
    return found


def classifier_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the classifiers of a timm model; distilled ones have two."""
    found: Any = model.get_classifier()  # type: ignore[operator]
    classifiers = found if isinstance(found, tuple) else (found,)
    return {parameter for classifier in classifiers for parameter in classifier.parameters()}


def prepare_model(
    config: Config, classes: int, device: torch.device
) -> tuple[nn.Module, InputFormat, int]:
    """The model of a run on its device, its input format, and the multiply-adds of one image over all epochs.

    A backward pass counts as two forward passes; epochs of the classifier alone have none. Raises the errors of
    `create_model`, and ValueError unless the model takes the image sizes of the config and returns logits of all
    classes.
    """
    # other processes need no initial weights, and other machines no folder of them
    model = shared(partial(create_model, config.model, classes, config.data.image_size))
    model = model.to(device).to(memory_format=torch.channels_last)
    input_format = input_format_of(model, config.data.image_size)
    channels, height, width = input_format.input_size
    macs = 0
    work: dict[Size, int] = {}
    for epoch in range(config.train.epochs):
        size = (channels, *image_size(config.augment, epoch, height, width))
        if size not in work:
            _check_output(model, size, classes)
            work[size] = training_macs(model, size)
        macs += work[size] * (3 if epoch >= config.train.head_epochs else 1)
    return model, input_format, macs


@torch.no_grad()
def _check_output(model: nn.Module, size: Size, classes: int) -> None:
    try:
        output = model.eval()(torch.zeros(1, *size, device=next(model.parameters()).device))
    except AssertionError as error:
        raise ValueError(
            "data.image_size, augment.small_epochs, augment.half_epochs: got images of "
            f"{size[1]}x{size[2]}: {error}"
        ) from error
    model.train()
    got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if got != (1, classes):
        raise ValueError(
            f"model.args: got a model whose output for an image is {got}, expected {(1, classes)}"
        )
