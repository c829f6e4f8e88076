"""Removes or initializes again chosen heads of a trained SANet, and writes the network as a new model folder.

Parameters of all kinds of score terms are handled alike: those of the heads lie one after the other along every axis
whose size grows with the number of heads.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import PretrainedCfg
from torch import nn

from sa_zoo.folders.metrics import Metrics, write_metrics
from sa_zoo.folders.write import new_folder, write_timm_files
from sa_zoo.models.network import SANet

Heads = dict[int, list[int]]  # block: its chosen heads, both counted from 0
SEED = 1_000_003  # unlike those of runs, so that new heads are not drawn as they were before


def prune_heads(network: nn.Module, heads: Heads) -> nn.Module:
    """A smaller network without the chosen heads; equal where their value matrices are zero.

    Raises ValueError for another kind of network, or if a block would be left without heads.
    """
    counts = _counts(network, heads)
    kept = [
        [head for head in range(count) if head not in heads.get(block, [])]
        for block, count in enumerate(counts)
    ]
    if empty := [str(block + 1) for block, left in enumerate(kept) if not left]:
        raise ValueError(
            f"heads: got all those of block {', '.join(empty)}, expected at least one to be left"
        )
    pruned = _like(network, [len(left) for left in kept])
    state = network.state_dict()
    for name, block, axes in _head_axes(network, counts):
        for axis in axes:
            by_head = state[name].unflatten(axis, [counts[block], -1])
            state[name] = by_head.index_select(axis, torch.tensor(kept[block])).flatten(
                axis, axis + 1
            )
    pruned.load_state_dict(state)
    return pruned


def reset_heads(network: nn.Module, heads: Heads) -> nn.Module:
    """A copy of the network whose chosen heads have the parameters of an untrained network, and no other does.

    Raises ValueError for another kind of network.
    """
    counts = _counts(network, heads)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        fresh = _like(network, counts)
    state, untrained = network.state_dict(), fresh.state_dict()
    for name, block, axes in _head_axes(network, counts):
        if axes and block in heads:
            (axis,) = axes
            mine, others = (
                tensor[name].unflatten(axis, [counts[block], -1]) for tensor in (state, untrained)
            )
            chosen = torch.tensor(heads[block])
            state[name] = mine.index_copy(axis, chosen, others.index_select(axis, chosen)).flatten(
                axis, axis + 1
            )
    fresh.load_state_dict(state)
    return fresh


def write_changed(network: nn.Module, out: Path, metrics: Metrics) -> None:
    """Write a network with other heads as a folder that timm loads; `out` must be new or empty."""
    with new_folder(out) as folder:
        write_timm_files(folder, network)
        write_metrics(folder, metrics)


def _counts(network: nn.Module, heads: Heads) -> list[int]:
    """N_h of each block."""
    if not isinstance(network, SANet):
        raise ValueError(
            f"model: got {type(network).__name__}, expected one of this package's attention networks"
        )
    blocks: Any = network.blocks
    counts = [block.attn.W_val.in_features // network.embed_dim for block in blocks]
    for block, chosen in heads.items():
        if not (0 <= block < len(counts) and all(0 <= head < counts[block] for head in chosen)):
            raise ValueError(
                f"heads: got {chosen} of block {block}, expected some of {counts} heads per block"
            )
    return counts


def _like(network: Any, num_heads: list[int], **more: Any) -> Any:
    """An untrained network that differs in its numbers of heads only."""
    arguments = (
        network._model_args
        | {"num_classes": network.num_classes, "global_pool": network.global_pool}
        | more
    )
    arguments["num_heads"] = num_heads[0] if len(set(num_heads)) == 1 else num_heads
    cfg = PretrainedCfg(**network.pretrained_cfg)
    like = timm.create_model(str(cfg.architecture), pretrained_cfg=cfg, **arguments)
    return like.to(network.patch_embed.weight.dtype).eval()


def _head_axes(network: Any, counts: list[int]) -> Iterable[tuple[str, int, list[int]]]:
    """Name and block of every parameter of attention, and its axes along which heads lie."""
    larger = _like(network, [count + 1 for count in counts], device="meta").state_dict()
    for name, value in network.state_dict().items():
        part, _, rest = name.removeprefix("blocks.").partition(".")
        if rest.startswith("attn."):
            yield (
                name,
                int(part),
                [a for a, size in enumerate(value.shape) if size != larger[name].shape[a]],
            )
