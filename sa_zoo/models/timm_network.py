"""The paper's networks and their ResNet baseline as timm classes, with timm's whole interface."""

from typing import Any

import torch
from timm.models import checkpoint, checkpoint_seq
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models.resnet import ResNet
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.fx import Proxy

from .blocks import Block, PostNormBlock
from .layout import ImageSize
from .network import AttentionNetwork, SANet, block_of, checked_pool, new_head, terms_in
from .plain import PlainBlock, PlainNet
from .terms import declared


class OneNode(Block):
    """A block that is one node of torch.fx's graphs: fx cannot follow the choices in its evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, D_in) -> (B, H', W', D)"""
        if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript compiles both sides of `and`
            if isinstance(x, Proxy):
                path = x.tracer.path_of_module(self)
                return x.tracer.create_proxy("call_module", path, (x,), {})
        return self.after_attention(x, self.attn(x))


class TimmNetwork(AttentionNetwork):
    """The rest of timm's interface, for SANet and PlainNet. Features are (B, H, W, D), one per level of the layout.

    inference_mode: build the network as changed by timm.utils.reparameterize_model, to load weights saved after it.
    """

    output_fmt = "NHWC"

    def __init__(self, *args: Any, inference_mode: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if inference_mode:
            reparameterize_model(self, inplace=True)
        self.grad_checkpointing = False
        self.levels = self.layout.levels
        self.feature_info = [
            {
                "num_chs": level.dim,
                "reduction": level.reduction,
                "module": f"blocks.{level.blocks - 1}",
            }
            for level in self.levels
        ]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C, R H, R W) -> tokens (B, H, W, D) of the last stage, with R the `reduction`"""
        x = self.embed(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return set(declared(self, "not_decayed"))

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^patch_embed", "blocks": r"^blocks\.(\d+)"}

    @torch.jit.ignore
    def set_input_size(self, img_size: ImageSize | None = None) -> None:
        """Accept images of another size; it is saved with the model."""
        super().set_input_size(img_size or self.img_size)
        update_model_input_size(self, self.img_size)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one for `num_classes` (0: none), and the pooling unless `global_pool` is None."""
        if global_pool is not None:
            self.global_pool = checked_pool(global_pool)
        self.num_classes = num_classes
        like = self.patch_embed.weight
        self.head = new_head(self.num_features, num_classes, device=like.device, dtype=like.dtype)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Features of chosen levels for images (B, C, R H, R W), as timm's models return them.

        indices: the last n levels if an int, all if None, else these. `norm` has no effect: each block ends in its own.
        """
        assert output_fmt in ("NCHW", "NHWC"), f"output_fmt: got {output_fmt}"
        chosen, last = feature_take_indices(len(self.levels), indices)
        ends = [self.levels[index].blocks for index in chosen]
        x = self.embed(x)
        intermediates = []
        blocks = self.blocks[: self.levels[last].blocks] if stop_early else self.blocks
        for done, block in enumerate(blocks, start=1):
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
            if done in ends:
                intermediates.append(x.permute(0, 3, 1, 2) if output_fmt == "NCHW" else x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the features at `indices`, and the head."""
        chosen, last = feature_take_indices(len(self.levels), indices)
        self.levels = self.levels[: last + 1]
        self.blocks = self.blocks[: self.levels[-1].blocks]
        if prune_head:
            self.reset_classifier(0, "")
        return chosen


class TimmPostNormBlock(OneNode, PostNormBlock):
    """The paper's block in timm."""


class TimmSANet(TimmNetwork, SANet):
    """The paper's network in timm."""

    block_class = TimmPostNormBlock


class TimmPlainBlock(OneNode, PlainBlock):
    """The plain block in timm."""


class TimmPlainNet(TimmNetwork, PlainNet):
    """The plain network in timm."""

    block_class = TimmPlainBlock


class CifarResNet(ResNet):
    """timm's ResNet for small images: a 3x3 stem of stride 1 and no max-pooling (He et al. 2016, as in the paper)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        like: Any = self.conv1.weight
        dd = {"device": like.device, "dtype": like.dtype}
        stem = nn.Conv2d(like.shape[1], 64, 3, padding=1, bias=False, **dd)
        self.conv1 = stem  # type: ignore[assignment]  # mypy takes the first of timm's assignments as the type
        self.maxpool = nn.Identity()  # type: ignore[assignment]
        for index, info in enumerate(self.feature_info):
            info["reduction"] = 2 ** max(index - 1, 0)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: TimmNetwork) -> dict[str, Tensor]:
    """Interpolate learned encodings of a checkpoint trained on another image size."""
    fitted = dict(state_dict)
    grids = model.layout.grids(model.img_size)
    for path, term in terms_in(model.blocks).items():
        grid = grids[block_of(path)]
        for name, target in term.named_parameters(recurse=False):
            key = f"blocks.{path}.{name}"
            given = fitted.get(key)
            # For differences other than the grid's, load_state_dict reports both shapes.
            if given is None or given.shape == target.shape or given.shape[-1] != target.shape[-1]:
                continue
            fitted[key] = term.resized(name, given, grid)
    return fitted
