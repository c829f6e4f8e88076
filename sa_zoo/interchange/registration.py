"""Makes transformers know the networks: at once where it is loaded already, else as soon as somebody imports it.

Importing this file costs nothing, and a program that never uses transformers never pays for it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_transformers() -> None:
    """Register the classes with transformers' Auto classes, now or when transformers is imported."""
    if sys.modules.get("transformers") is not None:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTransformers())


def _register() -> None:
    from transformers import (
        AutoBackbone,
        AutoConfig,
        AutoImageProcessor,
        AutoModel,
        AutoModelForImageClassification,
        CLIPImageProcessor,
        CLIPImageProcessorPil,
    )

    from sa_zoo.models.configuration_sa import SAConfig
    from sa_zoo.models.modeling_sa import SABackbone, SAForImageClassification, SAModel

    AutoConfig.register(SAConfig.model_type, SAConfig)
    processors: dict[str, type] = {"torchvision": CLIPImageProcessor, "pil": CLIPImageProcessorPil}
    AutoImageProcessor.register(SAConfig, image_processor_classes=processors)
    SAConfig.register_for_auto_class()
    models = {
        AutoModel: SAModel,
        AutoModelForImageClassification: SAForImageClassification,
        AutoBackbone: SABackbone,
    }
    for auto_class, model_class in models.items():
        auto_class.register(SAConfig, model_class)
        # From here on save_pretrained also writes the code, so that what it saves loads without this package.
        model_class.register_for_auto_class(auto_class.__name__)


class _AfterTransformers(MetaPathFinder):
    """Finds modules as the other finders do, and registers the networks once transformers has been executed.

    It waits for the package as a whole, and for this package's own files where they are what imports transformers:
    registering needs both complete.
    """

    waits_for = ("transformers", "sa_zoo.models.configuration_sa", "sa_zoo.models.modeling_sa")

    def __init__(self) -> None:
        self.executing = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waits_for:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        # Nothing happens yet: a library that only asks whether transformers exists comes here, too.
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.executing += 1
            try:
                execute(module)
            finally:
                self.executing -= 1
            if not self.executing:
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
