"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm, `timm.create_model("sa_quadratic_cifar")`, and, as soon as it is used,
with transformers, `AutoModelForImageClassification.from_pretrained(...)`.
"""

from .models import timm_backbones, timm_models
from .models.certificate import certificate
from .models.conversion import attention_from_conv, conv_from_attention
from .models.network_conversion import convert
from .models.registration import register_with_transformers

__version__ = "0.1.0"
__all__ = [
    "attention_from_conv",
    "certificate",
    "conv_from_attention",
    "convert",
    "timm_backbones",
    "timm_models",
]

register_with_transformers()
