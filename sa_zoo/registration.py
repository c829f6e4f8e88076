"""Registers the networks with timm and transformers after their import, and imports neither itself.

A hook runs after the import of a module. Hooks on folders of this package run before any module in them is imported,
so registration never meets a partially imported module.
"""

import sys
from importlib import import_module
from types import ModuleType

from wrapt import register_post_import_hook

CONFIGURATION = "sa_zoo.models.configuration_sa"
MODELING = "sa_zoo.models.modeling_sa"


def register_on_import() -> None:
    """Register the networks with timm and transformers, now or on import of either or of a network."""
    for name in ("timm", "sa_zoo.models", "sa_zoo.fast", "sa_zoo.convolution", "sa_zoo.vit"):
        register_post_import_hook(_register_with_timm, name)
    register_post_import_hook(_register_with_transformers, MODELING)
    for name in (CONFIGURATION, "transformers"):
        register_post_import_hook(_import_models, name)


def _register_with_timm(_: ModuleType) -> None:
    import_module("sa_zoo.timm_registration")


def _import_models(_: ModuleType) -> None:
    configuration = sys.modules.get(CONFIGURATION)
    # Without SAConfig, the module is being imported and is importing transformers: its own hook comes next.
    if configuration is None or hasattr(configuration, "SAConfig"):
        import_module(MODELING)  # its hook registers


def _register_with_transformers(modeling: ModuleType) -> None:
    import transformers

    from sa_zoo.models.configuration_sa import AUTO_MAP, SAConfig

    transformers.AutoConfig.register(SAConfig.model_type, SAConfig)
    kinds: dict[str, type] = {
        "torchvision": transformers.CLIPImageProcessor,
        "pil": transformers.CLIPImageProcessorPil,
    }
    transformers.AutoImageProcessor.register(SAConfig, image_processor_classes=kinds)
    SAConfig.register_for_auto_class()
    for name in ("AutoModel", "AutoModelForImageClassification", "AutoBackbone"):
        model_class = getattr(modeling, AUTO_MAP[name].partition(".")[2])
        getattr(transformers, name).register(SAConfig, model_class)
        # save_pretrained then also writes the code, so its folders load without this package
        model_class.register_for_auto_class(name)
