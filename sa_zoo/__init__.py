"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm, `timm.create_model("sa_quadratic_cifar")`, and, as soon as it is used,
with transformers, `AutoModelForImageClassification.from_pretrained(...)`.
"""

from .models import timm_models
from .models.registration import register_with_transformers

__version__ = "0.1.0"
__all__ = ["timm_models"]

register_with_transformers()
