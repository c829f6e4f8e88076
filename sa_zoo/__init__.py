"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm, `timm.create_model("sa_quadratic_cifar")`, and with transformers,
`AutoModelForImageClassification.from_pretrained(...)`, as soon as either is used. It imports neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .extras import explained
from .registration import register_on_import

__version__ = "0.1.0"

# The public functions, each imported on first use.
HOMES = {
    "add_positions": "vit.positions.add_positions",
    "attention_from_conv": "convolution.layer_conversion.attention_from_conv",
    "certificate": "convolution.certificate.certificate",
    "conv_from_attention": "convolution.layer_conversion.conv_from_attention",
    "convert": "convolution.network_conversion.convert",
    "evaluate": "commands.evaluate.evaluate",
    "explore": "analysis.explorer.explore",
    "finish": "commands.finish.finish_copy",
    "harden": "convolution.harden.harden",
    "open": "opened.open_model",
    "publish": "publishing.hub.publish",
    "train": "commands.train.train_recipe",
}
__all__ = list(HOMES)

# Type checkers and editors cannot read the table.
if TYPE_CHECKING:
    from . import opened as _opened
    from .analysis.explorer import explore as explore
    from .commands import finish as _finish
    from .commands import train as _train
    from .commands.evaluate import evaluate as evaluate
    from .convolution.certificate import certificate as certificate
    from .convolution.harden import harden as harden
    from .convolution.layer_conversion import attention_from_conv as attention_from_conv
    from .convolution.layer_conversion import conv_from_attention as conv_from_attention
    from .convolution.network_conversion import convert as convert
    from .publishing.hub import publish as publish
    from .vit.positions import add_positions as add_positions

    finish = _finish.finish_copy
    open = _opened.open_model
    train = _train.train_recipe


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, function = HOMES[name].rpartition(".")
    try:
        return getattr(import_module(f"{__name__}.{module}"), function)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"sa_zoo.{name}: {explained(error)}", name=error.name) from error


register_on_import()
