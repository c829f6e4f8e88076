"""python scripts/accepted_vits.py: the table in docs/vit.md of the vision transformers of timm that are accepted."""

from collections import defaultdict

import timm
import torch

from sa_zoo.vit.layers import attentions, grid_of


def why_not(name: str) -> str:
    """Why functions for vision transformers refuse this one of timm; "accepted" if they do not."""
    with torch.device("meta"):
        vit = timm.create_model(name)
    try:
        attentions(vit)
        grid_of(vit)
    except ValueError as error:
        return str(error).partition(",")[0].partition(" in block")[0].removeprefix("vit: got ")
    return "accepted"


if __name__ == "__main__":
    names = defaultdict(list)
    for name in timm.list_models("vit_*"):
        names[why_not(name)].append(name)
    print(f"| `vit_*` of timm {timm.__version__} | networks | such as |\n|---|--:|---|")
    for kind, some in sorted(names.items(), key=lambda row: -len(row[1])):
        print(f"| {kind} | {len(some)} | `{min(some, key=len)}` |")
