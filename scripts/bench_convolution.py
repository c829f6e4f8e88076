"""python scripts/bench_convolution.py --out runs/bench [--threads 1]

What attention costs beside the convolution that it expresses, as ratios within one run whose measurements take turns:
mhsa_resnet18 against resnet18, and single layers at finite alpha, forward and backward, with the explicit softmax of
the same layer where it fits into memory. Writes bench.json and bench.md.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from sa_zoo import attention_from_conv
from sa_zoo.analysis.timing import in_turns, peak_bytes

CPU = torch.device("cpu")
# Channels and side of an image: ResNet18's four stages at 224x224, and a layer of a CIFAR network.
LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7), (32, 32))
ALPHAS = (20.0, 4.0)  # a composed kernel of the convolution's size, and one two wider
BATCHES = (8, 32)  # the second one is a training batch, over which composing a kernel spreads
EXPLICIT_BYTES = 2**31  # larger attention maps are not built


def ratios(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each run relative to the first one's of the same round."""
    times = in_turns(runs, rounds, CPU)
    first = times[next(iter(runs))]
    relative = {
        name: statistics.median(mine / other for mine, other in zip(taken, first, strict=True))
        for name, taken in times.items()
    }
    return relative | {"milliseconds": 1e3 * statistics.median(first)}


def network_time(batch: int, rounds: int) -> dict[str, float]:
    """Inference of mhsa_resnet18 relative to resnet18, both with the same weights."""
    cnn, backbone = timm.create_model("resnet18").eval(), timm.create_model("mhsa_resnet18").eval()
    x = torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        return ratios({"resnet18": lambda: cnn(x), "mhsa_resnet18": lambda: backbone(x)}, rounds)


def memory(name: str, batch: int) -> int:
    """Bytes of a network's tensors and of the most that one inference adds to them."""
    network, x = timm.create_model(name).eval(), torch.randn(batch, 3, 224, 224)
    with torch.inference_mode():
        most = peak_bytes(lambda: network(x), CPU)
    held = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    return held + most


def layer_time(channels: int, side: int, alpha: float, batch: int, rounds: int) -> dict[str, float | str]:
    """Speed of a 3x3 layer's forward and backward relative to the convolution's."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    layer = attention_from_conv(conv, alpha)
    x = torch.randn(batch, channels, side, side, requires_grad=True)
    direction = torch.randn_like(x)

    def step(forward: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: forward(x).backward(direction)

    runs = {"convolution": step(conv), "attention": step(layer)}
    map_bytes = 4 * 9 * side**2 * (side + 2) ** 2
    if map_bytes <= EXPLICIT_BYTES and batch == BATCHES[0]:
        runs["explicit"] = step(layer.explicit)
    measured = ratios(runs, rounds)
    sizes = layer.key_sizes([side, side])
    return {
        "layer": f"{channels} channels, {side}x{side}",
        "batch": batch,
        "alpha": alpha,
        "kernel": f"{layer.count[0]}x{layer.count[1]}",
        "evaluation": "by axes" if layer.cheaper_by_axes(sizes) else "composed",
        "convolution_ms": measured["milliseconds"],
        "speed": 1 / measured["attention"],
        "explicit_slower": measured.get("explicit", math.nan),
        "map_mib": map_bytes / 2**20,
    }


def stem_map_bytes(image: int = 224) -> int:
    """Attention maps of resnet18's stem, explicitly, for one image."""
    layer = attention_from_conv(nn.Conv2d(3, 64, 7, stride=2, padding=3, device="meta"), 4.0)
    sizes = layer.key_sizes([image, image])
    return 4 * len(layer.alpha) * math.prod(layer.queries(sizes)) * math.prod(sizes)


def table(result: dict) -> str:
    lines = ["| network | batch | time | memory |", "|---|---|---|---|"]
    for row in result["networks"]:
        lines.append(f"| mhsa_resnet18 / resnet18 | {row['batch']} | {row['time']:.3f} | {row['memory']:.3f} |")
    lines += ["", "| layer | batch | alpha | kernel | evaluation | speed | explicit softmax | its maps |"]
    lines.append("|---" * 8 + "|")
    for row in result["layers"]:
        slower = "" if math.isnan(row["explicit_slower"]) else f"{row['explicit_slower']:.0f}x slower"
        lines.append(
            f"| {row['layer']} | {row['batch']} | {row['alpha']:g} | {row['kernel']} | {row['evaluation']} "
            f"| {row['speed']:.2f} | {slower} | {row['map_mib']:,.0f} MiB |"
        )
    stem = f"Explicit maps of resnet18's stem, one image of 224x224: {result['stem_map_bytes'] / 1e9:.0f} GB."
    return "\n".join([*lines, "", stem, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[2])
    parser.add_argument("--out", type=Path, help="folder for bench.json and bench.md")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    networks = []
    for batch in (1, 8):
        mine, other = (memory(name, batch) for name in ("mhsa_resnet18", "resnet18"))
        measured = network_time(batch, options.rounds)
        networks.append({"batch": batch, "time": measured["mhsa_resnet18"], "memory": mine / other} | measured)
    layers = [
        layer_time(*shape, alpha, batch, options.rounds) for alpha in ALPHAS for batch in BATCHES for shape in LAYERS
    ]
    result = {
        "networks": networks,
        "layers": layers,
        "stem_map_bytes": stem_map_bytes(),
        "threads": options.threads,
        "torch": torch.__version__,
    }
    text = table(result)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (options.out / "bench.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
