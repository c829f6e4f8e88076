"""The paper's networks for transformers: a base model, an image classifier and a backbone, built from the same blocks.

Modules have the same names as in timm_models.py, at the top level, so one file of weights fits both libraries.
Hidden states are (B, T, D), as is usual in transformers. R is the layout's `reduction`. This file is also
published together with weights, as remote code.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import Attention
from .blocks import Block, PostNormBlock
from .configuration_sa import SAConfig

# transformers before 5.10 copies only remote code imported by this file itself.
from .content import Content  # noqa: F401
from .layout import Grid, ImageSize
from .linear import is_plain  # noqa: F401
from .network import AttentionNetwork, Embedding, SANet, new_head, set_grids
from .norm import BatchNorm  # noqa: F401
from .plain import PlainBlock, PlainNet
from .positions import pixels  # noqa: F401
from .terms import Term  # noqa: F401
from .variants import TYPES


class SAAttention(Attention):
    """Attention that returns its probabilities on request."""

    def forward(self, X: Tensor, output_attentions: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, D) -> (B, H, W, D), and the probabilities (B, N_h, T, T) if they are requested.

        Returning them means building them, O(T^2), even where attention is otherwise evaluated by axes.
        """
        if not output_attentions:
            return super().forward(X), None
        P = self.attn_drop(self.probabilities(X)).expand(X.shape[0], -1, -1, -1)
        return self.W_out(self.values(P, X)), P


class SABlock(GradientCheckpointingLayer, Block):
    """A block on (B, T, D)."""

    attention_class = SAAttention

    def forward(self, hidden_states: Tensor, grid: Grid, output_attentions: bool = False) -> Tensor:
        """(B, T_in, D_in) -> (B, T, D), with T_in = H * W and (H, W) the grid of the input."""
        X = hidden_states.unflatten(1, grid)
        Y, _ = self.attn(X, output_attentions)
        return self.after_attention(X, Y).flatten(1, 2)


class SAPostNormBlock(SABlock, PostNormBlock):
    """The paper's block in transformers."""


class SAPlainBlock(SABlock, PlainBlock):
    """The plain block in transformers."""


class SAPaperNet(SANet):
    """The paper's network with blocks for transformers."""

    block_class = SAPostNormBlock


class SAPlainNet(PlainNet):
    """The plain network with blocks for transformers."""

    block_class = SAPlainBlock


NETWORKS: dict[type[AttentionNetwork], Any] = {SANet: SAPaperNet, PlainNet: SAPlainNet}


class SAPreTrainedModel(Embedding, PreTrainedModel):
    """Embedding and blocks, shared by the three models."""

    config: SAConfig
    config_class = SAConfig
    base_model_prefix = ""  # no wrapper: keys of a state dict are never renamed
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]  # a tuple in transformers' own models, too
    supports_gradient_checkpointing = True
    _no_split_modules = [  # noqa: RUF012  transformers' own declaration
        "SAPostNormBlock",
        "SAPlainBlock",
    ]
    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012  a classifier's
    _input_embed_layer = "patch_embed"
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": SABlock,
        "attentions": OutputRecorder(SAAttention, index=1),
    }

    def __init__(self, config: SAConfig) -> None:
        super().__init__(config)
        # not `config.variant`: as remote code, the configuration has other copies of these classes
        variant = TYPES[config.attention_type]
        drop_path = {"drop_path_rate": config.drop_path_rate} if config.drop_path_rate else {}
        network = NETWORKS[variant.network](
            **variant.arguments | config.sizes | drop_path,
            img_size=config.height_and_width,
            in_chans=config.num_channels,
            num_classes=0,
            proj_drop_rate=config.hidden_dropout_prob,
            attn_drop_rate=config.attention_probs_dropout_prob,
        )
        # at the top level, as timm has them
        self.patch_embed = network.patch_embed
        self.blocks = nn.ModuleList(network.blocks)
        self.layout = network.layout
        self.reduction = network.reduction

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """By each layer's `reset_parameters`; loaded tensors keep their values.

        As in timm, but plain blocks do not start as the identity: transformers skips modules without own tensors.
        """
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            return
        tensors = [*module.parameters(), *module.buffers()]
        loaded = [(x, x.clone()) for x in tensors if getattr(x, "_is_hf_initialized", False)]
        reset()
        for tensor, value in loaded:
            tensor.copy_(value)

    @capture_outputs
    def encode(self, pixel_values: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        """Images (B, C, R H, R W) -> tokens (B, T, D), row by row."""
        if pixel_values is None:
            raise ValueError("pixel_values: got None, expected images (B, C, H, W)")
        output_attentions = bool(kwargs.get("output_attentions", self.config.output_attentions))
        X = self.embed(pixel_values.to(self.patch_embed.weight.dtype))  # (B, H, W, D)
        hidden_states = X.flatten(1, 2)  # (B, T, D)
        for block, grid in zip(self.blocks, self.layout.grids(pixel_values.shape[2:]), strict=True):
            hidden_states = block(hidden_states, grid, output_attentions)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def set_input_size(self, image_size: ImageSize) -> None:
        """Accept images of another size; learned encodings are interpolated into new parameters."""
        height, width = self.layout.checked_size(image_size)
        self.config.image_size = height if height == width else [height, width]
        set_grids(self.blocks, self.layout.grids((height, width)))


class SAModel(SAPreTrainedModel):
    """Tokens of the last block, and their mean."""

    def __init__(self, config: SAConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Images (B, C, R H, R W) -> tokens (B, T, D) and their mean (B, D)."""
        outputs = self.encode(pixel_values, return_dict=True, **kwargs)
        return BaseModelOutputWithPooling(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.last_hidden_state.mean(dim=1),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SAForImageClassification(SAPreTrainedModel):
    """The networks of the paper: mean over tokens, then a linear map."""

    def __init__(self, config: SAConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.head_drop = nn.Dropout(config.classifier_dropout)
        self.head = new_head(self.layout.levels[-1].dim, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Images (B, C, R H, R W) -> logits (B, num_labels), and the loss if labels are given.

        labels: (B,) class numbers or, by `config.problem_type`, (B, num_labels) or (B,) floating-point numbers.
        """
        outputs = self.encode(pixel_values, return_dict=True, **kwargs)
        logits = self.head(self.head_drop(outputs.last_hidden_state.mean(dim=1)))
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SABackbone(BackboneMixin, SAPreTrainedModel):
    """Feature maps of chosen stages; index 0 is the embedding, the others are the configuration's levels."""

    def __init__(self, config: SAConfig) -> None:
        super().__init__(config)
        self.num_features = [
            self.patch_embed.out_channels,
            *(level.dim for level in self.layout.levels),
        ]
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BackboneOutput:
        """Images (B, C, R H, R W) -> one map (B, D, H, W) per chosen stage, or tokens: see SAConfig."""
        kwargs["output_hidden_states"] = True  # transformers 5.4 leaves this to us
        outputs = self.encode(pixel_values, return_dict=True, **kwargs)
        blocks = [0, *(level.blocks for level in self.layout.levels)]  # before each stage's output
        grids = self.layout.token_grids(pixel_values.shape[2:])
        feature_maps = []
        for index in self.out_indices:
            tokens = outputs.hidden_states[blocks[index]]
            if self.config.reshape_hidden_states:
                feature_maps.append(tokens.transpose(1, 2).unflatten(2, grids[blocks[index]]))
            else:
                feature_maps.append(torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1))
        return BackboneOutput(
            feature_maps=tuple(feature_maps),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
