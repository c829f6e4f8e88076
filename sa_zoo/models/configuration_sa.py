"""The networks' configuration for transformers and timm: one config.json for both.

timm's keys are derived from the fields on writing and dropped on reading, so they cannot contradict each other. This
file is also published together with weights, as remote code.
"""

from typing import Any

from transformers.utils.versions import require_version

require_version("transformers>=5.4")  # before imports that older versions lack
# ruff: noqa: E402

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig

# transformers before 5.10 copies only remote code imported by this file itself.
from .attention import Attention  # noqa: F401
from .blocks import Block  # noqa: F401
from .content import Content  # noqa: F401
from .layout import Layout, height_and_width
from .linear import is_plain  # noqa: F401
from .network import SANet
from .norm import BatchNorm  # noqa: F401
from .plain import PlainNet  # noqa: F401
from .positions import pixels  # noqa: F401
from .terms import has_fixed_size
from .variants import TYPES, Variant

# Where transformers finds the classes in a folder with copies of these files.
AUTO_MAP = {
    "AutoConfig": "configuration_sa.SAConfig",
    "AutoModel": "modeling_sa.SAModel",
    "AutoModelForImageClassification": "modeling_sa.SAForImageClassification",
    "AutoBackbone": "modeling_sa.SABackbone",
}
DERIVED = {
    "num_classes",
    "num_features",
    "global_pool",
    "label_names",
    "label_descriptions",
    "model_args",
    "stage_names",
}
# The fields with the arguments of a network.
SIZES = {
    "patch_size": "patch_size",
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
# One number for all stages, or one per stage. JSON has lists.
PerStage = int | list[int] | tuple[int, ...]


@strict
class SAConfig(BackboneConfigMixin, PreTrainedConfig):
    """Self-attention networks of Cordonnier, Loukas, Jaggi (ICLR 2020); by default SA-quadratic with two classes.

    Args:
        attention_type: the network and its score terms (TYPES in variants.py); the part of a timm name between `sa_`
            and `_cifar`.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: D, number of blocks, N_h, width of the
            feed-forward layers; for a plain network, one number per stage, and None. Every head sees all D channels.
        image_size, patch_size: in pixels; image_size is one number, or height and width.
        num_channels: of the images.
        hidden_dropout_prob, attention_probs_dropout_prob, classifier_dropout, drop_path_rate: timm's proj_drop_rate,
            attn_drop_rate, drop_rate and drop_path_rate.
        architecture: timm's name of the variant; default: `sa_{attention_type}_cifar`.
        pretrained_cfg: timm's description of the weights: mean, std, interpolation, crop_pct, license, paper. Entries
            derived from other fields are replaced on writing.
        image_processor_type: the class for preprocessor_config.json.
        reshape_hidden_states: whether a backbone's features are maps (B, D, H, W). If not, they are (B, 1 + T, D): the
            mean over pixels, in the place of a class token, and the tokens, as DPT and Depth Anything expect.
        out_features, out_indices: stages returned by a backbone. "stem" and index 0 are the embedding, "stageN" and
            index N the output of the Nth stage of a plain network, or of the Nth block of others.
    """

    model_type = "sa_net"

    attention_type: str = "quadratic"
    hidden_size: PerStage = 400
    num_hidden_layers: PerStage = 6
    num_attention_heads: PerStage = 9
    intermediate_size: PerStage | None = 512
    image_size: int | list[int] | tuple[int, int] = 32
    patch_size: int = 2
    num_channels: int = 3
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int = 0.0
    drop_path_rate: float | int = 0.0
    architecture: str | None = None
    pretrained_cfg: dict[str, Any] | None = None
    image_processor_type: str = "CLIPImageProcessor"
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.attention_type not in TYPES:
            got = f"attention_type: got {self.attention_type!r}"
            raise ValueError(f"{got}, expected one of {', '.join(TYPES)}")
        if self.variant.network is not SANet:
            self.intermediate_size = None
        kwargs = {key: value for key, value in kwargs.items() if key not in DERIVED}
        if self.architecture is None:
            self.architecture = f"sa_{self.attention_type}_cifar"
        self.set_output_features_output_indices(
            out_features=kwargs.pop("out_features", None),
            out_indices=kwargs.pop("out_indices", None),
        )
        super().__post_init__(**kwargs)

    @property
    def stage_names(self) -> list[str]:
        return ["stem", *(f"stage{number}" for number, _ in enumerate(self.layout.levels, start=1))]

    @property
    def variant(self) -> Variant:
        """The row with this `attention_type`."""
        return TYPES[self.attention_type]

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of the network."""
        sizes = {name: getattr(self, field) for name, field in SIZES.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def layout(self) -> Layout:
        network: Any = self.variant.network  # each class has sizes of its own
        layout: Layout = network.layout_of(**self.sizes)
        return layout

    @property
    def height_and_width(self) -> tuple[int, int]:
        """`image_size` as (height, width), in pixels."""
        return height_and_width(self.image_size)

    def to_dict(self) -> dict[str, Any]:
        """All fields, timm's keys, and the location of the code."""
        # num_classes stays out of model_args: transformers' wrapper of timm passes its own number of labels as well.
        labels: Any = self.id2label
        derived = {
            "num_classes": self.num_labels,
            "num_features": self.layout.levels[-1].dim,
            "global_pool": "avg",
            "label_names": [labels[index] for index in sorted(labels)],
            "model_args": {
                "img_size": self.image_size,
                "in_chans": self.num_channels,
                **self.sizes,
            },
            "pretrained_cfg": {
                "first_conv": "patch_embed",
                "classifier": "head",
                **(self.pretrained_cfg or {}),
                "num_classes": self.num_labels,
                "input_size": [self.num_channels, *self.height_and_width],
                "pool_size": None,
                "fixed_input_size": has_fixed_size(self.variant.terms),
            },
        }
        return super().to_dict() | derived | {"auto_map": dict(AUTO_MAP)}
