"""Reads checkpoints of the paper's own code, https://github.com/epfml/attention-cnn at 9ffaa306.

Rows and columns, displacements, heads and channels have the same order there (models/bert.py) as here. So names change,
and one tensor is reshaped: the linear map after space-to-depth, whose input has the order (y, x, channel).
"""

from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from sa_zoo.interchange.timm_checkpoint import checkpoint_of, read_checkpoint

CONVERTIBLE = (
    "sa_quadratic_cifar",
    "sa_quadratic_h16_cifar",
    "sa_quadratic_gen_cifar",
    "sa_learned_cifar",
)

# Part of a name there -> here, replaced in this order.
RENAMED = {
    "features_upscale.": "patch_embed.",
    "encoder.layer.": "blocks.",
    "attention.self.attention_centers": "attn.terms.0.Delta",
    "attention.self.attention_spreads": "attn.terms.0.spread",
    "attention.self.row_embeddings.weight": "attn.terms.0.row",
    "attention.self.col_embeddings.weight": "attn.terms.0.col",
    "attention.self.head_keys_row.weight": "attn.terms.0.w",
    "attention.self.head_keys_col.weight": "attn.terms.0.v",
    "attention.self.value.": "attn.W_val.",
    "attention.output.dense.": "attn.W_out.",
    "attention.output.LayerNorm.": "norm1.",
    "intermediate.dense.": "fc1.",
    "output.dense.": "fc2.",
    "output.LayerNorm.": "norm2.",
    "classifier.": "head.",
}
# Computed, not learned.
BUFFERS = ("attention_mask", "attention.self.R", "attention.self.relative_indices")


def network_from_reference(checkpoint: Path, model: str) -> nn.Module:
    """The network that the paper's train.py saved.

    `model` is one of CONVERTIBLE. Raises ValueError for another name or a checkpoint of another model, and what
    `read_checkpoint` raises.
    """
    if model not in CONVERTIBLE:
        raise ValueError(f"model: got {model!r}, expected one of {', '.join(CONVERTIBLE)}")
    content = read_checkpoint(checkpoint)
    with checkpoint_of(checkpoint, model):
        reference = content["model_state_dict"]
        net: Any = timm.create_model(model, num_classes=len(reference["classifier.weight"]))
        net.load_state_dict(_state_dict(reference, net.patch_size))
    return net


def _state_dict(reference: dict[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """The same tensors as a SANet names and shapes them; unknown ones keep their names."""
    state = {}
    for name, value in reference.items():
        if not name.endswith(BUFFERS):
            for theirs, ours in RENAMED.items():
                name = name.replace(theirs, ours)
            state[name] = value
    # (D, y, x, channel)
    kernel = state["patch_embed.weight"].unflatten(1, [patch_size, patch_size, -1])
    return state | {"patch_embed.weight": kernel.permute(0, 3, 1, 2)}
