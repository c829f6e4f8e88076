"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm, `timm.create_model("sa_quadratic_cifar")`, and, as soon as it is used,
with transformers, `AutoModelForImageClassification.from_pretrained(...)`.
"""

from typing import TYPE_CHECKING, Any

from .convolution import timm_backbones
from .convolution.certificate import certificate
from .convolution.layer_conversion import attention_from_conv, conv_from_attention
from .convolution.network_conversion import convert
from .interchange.registration import register_with_transformers
from .kernels import choose
from .models import timm_models

if TYPE_CHECKING:
    from .analysis.explorer import explore

__version__ = "0.1.0"
__all__ = [
    "attention_from_conv",
    "certificate",
    "conv_from_attention",
    "convert",
    "explore",
    "timm_backbones",
    "timm_models",
]

choose.install()
register_with_transformers()


def __getattr__(name: str) -> Any:
    """`explore` on first use: it imports libraries that models and training do without."""
    if name == "explore":
        from .analysis.explorer import explore

        return explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
