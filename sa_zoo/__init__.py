"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm, `timm.create_model("sa_quadratic_cifar")`, and with transformers,
`AutoModelForImageClassification.from_pretrained(...)`, as soon as either is used. It imports neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .interchange.registration import register

if TYPE_CHECKING:
    from .analysis.explorer import explore
    from .convolution.certificate import certificate
    from .convolution.harden import harden
    from .convolution.layer_conversion import attention_from_conv, conv_from_attention
    from .convolution.network_conversion import convert
    from .vit.convolve import convolve_heads
    from .vit.positions import add_positions
    from .vit.start import start_as_convolution

__version__ = "0.1.0"
__all__ = [
    "add_positions",
    "attention_from_conv",
    "certificate",
    "conv_from_attention",
    "convert",
    "convolve_heads",
    "explore",
    "harden",
    "start_as_convolution",
]

# What `sa_zoo.NAME` is, imported on first use.
HOMES = {
    "add_positions": "vit.positions",
    "attention_from_conv": "convolution.layer_conversion",
    "certificate": "convolution.certificate",
    "conv_from_attention": "convolution.layer_conversion",
    "convert": "convolution.network_conversion",
    "convolve_heads": "vit.convolve",
    "explore": "analysis.explorer",
    "harden": "convolution.harden",
    "start_as_convolution": "vit.start",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


register()
