"""What a run records of its attention heads, for figures: how they move, and what they attend to in images.

- heads.safetensors: the positional parameters, epoch by epoch
- attention.safetensors: mean maps over test images, where attention depends on their content
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sa_zoo.model_folder import write_file
from sa_zoo.models.network import SANet

HEADS, MAPS = "heads.safetensors", "attention.safetensors"
IMAGES = 100  # that maps are averaged over, as in the paper's Figure 6
IMAGES_AT_ONCE = 5
# Parameters of score terms that depend on positions alone, by their names in state dicts.
POSITIONAL = re.compile(r"(^|\.)(Delta|spread|alpha|terms\.\d+\.(row|col|w|v|P))$")


def record_heads(folder: Path, model: nn.Module, epoch: int) -> None:
    """Write row `epoch` of every positional parameter; row 0 is the initialization.

    Each tensor of the file is (epochs + 1, *shape of the parameter). Later rows are dropped: a resumed run writes them
    again. Nothing is written for a model without such parameters.

    Raises ValueError if the file lacks earlier epochs.
    """
    rows = {name: value.detach().cpu() for name, value in model.named_parameters() if POSITIONAL.search(name)}
    if not rows:
        return
    path = folder / HEADS
    earlier = load_file(path) if epoch and path.is_file() else {}
    known = min((len(earlier.get(name, ())) for name in rows), default=0)
    if known < epoch:
        raise ValueError(f"{path}: got {known} recorded epochs, expected at least the {epoch} before this one")
    stacked = {name: torch.stack([*earlier.get(name, ())[:epoch], row]) for name, row in rows.items()}
    write_file(path, save(stacked, {"format": "pt"}))


@torch.no_grad()
def record_maps(folder: Path, model: nn.Module, images: Tensor) -> None:
    """Write what the heads of a SANet attend to from the pixel in the middle, averaged over images (B, C, P H, P W).

    Each tensor of the file is (N_h, H, W), under the name of its layer. Nothing is written for attention that depends
    on positions only, or for another network.
    """
    if not isinstance(model, SANet) or all(_is_positional(block) for block in model.blocks):
        return
    height, width = (size // model.patch_size for size in images.shape[2:])
    query, means = height // 2 * width + width // 2, [torch.zeros(()) for _ in model.blocks]
    for some in images.split(IMAGES_AT_ONCE):
        for index, P in enumerate(model.eval().attention_maps(some)):
            seen = P[..., query, :].unflatten(-1, [height, width]).cpu()  # (B, N_h, H, W)
            means[index] = means[index] + seen.sum(dim=0) / len(images)
    named = {f"blocks.{index}.attn": mean for index, mean in enumerate(means)}
    write_file(folder / MAPS, save(named, {"format": "pt"}))


def _is_positional(block: nn.Module) -> bool:
    return all(getattr(term, "positional", False) for term in block.attn.terms)  # type: ignore[union-attr]
