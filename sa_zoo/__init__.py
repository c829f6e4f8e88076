"""sa_zoo: self-attention that can express convolution, for timm and Hugging Face.

Importing it registers the models with timm: `timm.create_model("sa_quadratic_cifar")`.
"""

from .models import timm_models

__version__ = "0.1.0"
__all__ = ["timm_models"]
