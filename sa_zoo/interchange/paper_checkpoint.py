"""Reads checkpoints of the paper's own code, https://github.com/epfml/attention-cnn at 9ffaa306.

There (models/bert.py, models/transformer.py) an image tensor has its rows first, centres have the order (row,
column), `row_embeddings` are indexed by the displacement within a row (dx) and `col_embeddings` by that within a
column (dy), as here; heads and channels of `value` have the order of `W_val`. So names change, and one tensor is
reshaped: the linear map after space-to-depth, whose input has the order (y, x, channel).
"""

import re
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from sa_zoo.model_folder import check_new, new_folder, write_timm_files

CONVERTIBLE = ("sa_quadratic_cifar", "sa_quadratic_h16_cifar", "sa_quadratic_gen_cifar", "sa_learned_cifar")

# Their name of a tensor -> ours. None: a buffer that is derived, not learned.
RENAMED = {
    r"features_upscale\.(weight|bias)": r"patch_embed.\1",
    r"encoder\.layer\.(\d+)\.attention\.self\.attention_centers": r"blocks.\1.attn.terms.0.Delta",
    r"encoder\.layer\.(\d+)\.attention\.self\.attention_spreads": r"blocks.\1.attn.terms.0.spread",
    r"encoder\.layer\.(\d+)\.attention\.self\.row_embeddings\.weight": r"blocks.\1.attn.terms.0.row",
    r"encoder\.layer\.(\d+)\.attention\.self\.col_embeddings\.weight": r"blocks.\1.attn.terms.0.col",
    r"encoder\.layer\.(\d+)\.attention\.self\.head_keys_row\.weight": r"blocks.\1.attn.terms.0.w",
    r"encoder\.layer\.(\d+)\.attention\.self\.head_keys_col\.weight": r"blocks.\1.attn.terms.0.v",
    r"encoder\.layer\.(\d+)\.attention\.self\.value\.(weight|bias)": r"blocks.\1.attn.W_val.\2",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(weight|bias)": r"blocks.\1.attn.W_out.\2",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(weight|bias)": r"blocks.\1.norm1.\2",
    r"encoder\.layer\.(\d+)\.intermediate\.dense\.(weight|bias)": r"blocks.\1.fc1.\2",
    r"encoder\.layer\.(\d+)\.output\.dense\.(weight|bias)": r"blocks.\1.fc2.\2",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(weight|bias)": r"blocks.\1.norm2.\2",
    r"classifier\.(weight|bias)": r"head.\1",
    r"attention_mask": None,
    r"encoder\.layer\.\d+\.attention\.self\.(R|relative_indices)": None,
}


def state_dict_from_reference(reference: dict[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """The state dict of a SANet from one of the paper's code.

    Raises ValueError for a name that the paper's code does not give to any part of a SANet.
    """
    state = {}
    for name, value in reference.items():
        pattern = next((pattern for pattern in RENAMED if re.fullmatch(pattern, name)), None)
        if pattern is None:
            raise ValueError(
                f"checkpoint: got a tensor {name!r}, expected the names of epfml/attention-cnn at 9ffaa306"
            )
        if (renamed := RENAMED[pattern]) is not None:
            state[re.sub(pattern, renamed, name)] = value
    if "patch_embed.weight" in state:
        kernel = state["patch_embed.weight"].unflatten(1, [patch_size, patch_size, -1])  # (D, y, x, channel)
        state["patch_embed.weight"] = kernel.permute(0, 3, 1, 2).contiguous()
    return state


def convert_reference(checkpoint: Path, model: str, out: Path) -> None:
    """Write the weights of a checkpoint of the paper's code as a folder that timm loads, completely or not at all.

    The file is read without running code that it may hold.

    Args:
        checkpoint: a file of the paper's train.py, {"model_state_dict": ..., ...}.
        model: the variant that it holds, one of CONVERTIBLE.
        out: a folder that does not exist yet, or is empty.

    Raises FileNotFoundError if there is no checkpoint, FileExistsError if `out` is not empty, ValueError for another
    model name, or a checkpoint that is damaged or of another model.
    """
    if model not in CONVERTIBLE:
        raise ValueError(f"model: got {model!r}, expected one of {', '.join(CONVERTIBLE)}")
    check_new(out)
    reference = _read(checkpoint)
    classes = reference["classifier.weight"].shape[:1] if "classifier.weight" in reference else ()
    net: Any = timm.create_model(model, num_classes=classes[0] if classes else 10)
    try:
        net.load_state_dict(state_dict_from_reference(reference, net.patch_size))
    except (RuntimeError, IndexError) as error:  # shapes
        raise ValueError(f"checkpoint: got {checkpoint}, expected one of {model}: {error}") from error
    with new_folder(out) as folder:
        write_timm_files(folder, net)


def _read(checkpoint: Path) -> dict[str, Tensor]:
    if not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint: got {checkpoint}, expected a file")
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of any kind for a file that is not one of its own
        raise ValueError(
            f"checkpoint: got {checkpoint}, expected a complete file that torch.save wrote, with tensors only"
        ) from error
    state = content.get("model_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise ValueError(
            f"checkpoint: got {checkpoint} without a 'model_state_dict' of tensors, expected one of the paper's code"
        )
    return state
