"""Registers the networks with transformers once it is imported; a program that never uses it never imports it."""

import sys
from types import ModuleType

from wrapt import register_post_import_hook

CONFIGURATION, MODELING = "sa_zoo.models.configuration_sa", "sa_zoo.models.modeling_sa"


def register_with_transformers() -> None:
    """Register the classes with transformers' Auto classes, now or when transformers is imported."""
    register_post_import_hook(_register, MODELING)
    for name in (CONFIGURATION, "transformers"):
        register_post_import_hook(_import_models, name)


def _import_models(_: ModuleType) -> None:
    configuration = sys.modules.get(CONFIGURATION)
    # Without its class, it is being imported right now and is what imports transformers: its own hook comes next.
    if configuration is None or hasattr(configuration, "SAConfig"):
        import sa_zoo.models.modeling_sa  # noqa: F401  whose hook registers


def _register(modeling: ModuleType) -> None:
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
        # save_pretrained then also writes the code, so that what it saves loads without this package
        model_class.register_for_auto_class(name)
