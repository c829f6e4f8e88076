"""Importing this module registers the networks with timm and installs the forms of fast/."""

from sa_zoo.convolution import timm_backbones  # noqa: F401
from sa_zoo.fast import route
from sa_zoo.models import timm_models  # noqa: F401
from sa_zoo.vit import timm_vits  # noqa: F401

route.install()
