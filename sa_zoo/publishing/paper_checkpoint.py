"""Checkpoints of the paper's own code, https://github.com/epfml/attention-cnn at 9ffaa306.

Rows and columns, displacements, heads and channels have the same order there (models/bert.py) as here. Only names
change, and one tensor is reshaped: the linear map after space-to-depth, with input in the order (y, x, channel).
"""

from torch import Tensor

PATCH_SIZE = 2
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


def state_from_paper(reference: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the names and shapes of a SANet; unknown ones keep their names."""
    state = {}
    for name, value in reference.items():
        if not name.endswith(BUFFERS):
            for theirs, ours in RENAMED.items():
                name = name.replace(theirs, ours)
            state[name] = value
    # (D, y, x, channel)
    kernel = state["patch_embed.weight"].unflatten(1, [PATCH_SIZE, PATCH_SIZE, -1])
    return state | {"patch_embed.weight": kernel.permute(0, 3, 1, 2)}
