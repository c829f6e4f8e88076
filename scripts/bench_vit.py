"""Time and memory of positions in a vision transformer: python scripts/bench_vit.py [--sizes 224 512] [--rounds 9]

All networks have the width and heads of vit_tiny_patch16_224 and two blocks, and take turns. Ratios are to the plain
network: CPU time of this process, the smallest of all rounds, and peak memory allocated during a training step.
"""

import argparse
import time
from collections.abc import Callable

import timm
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import sa_zoo

SIZES = {"embed_dim": 192, "num_heads": 3, "depth": 2, "patch_size": 16}
PLAIN = "plain network"


def networks(size: int) -> dict[str, nn.Module]:
    sizes = SIZES | {"img_size": size, "class_token": False, "global_pool": "avg"}
    plain = timm.create_model("vit_tiny_patch16_224", **sizes)
    positions = timm.create_model("vit_tiny_patch16_224", **sizes)
    relative = {**sizes, "fc_norm": True, "init_values": None, "qkv_bias": True}
    relative.pop("global_pool")
    bias = timm.create_model("vit_relpos_small_patch16_224", global_pool="avg", **relative)
    rotary = timm.create_model(
        "vit_small_patch16_rope_224", **{key: sizes[key] for key in SIZES}, img_size=size
    )
    return {
        PLAIN: plain,
        "`add_positions`": sa_zoo.add_positions(positions),
        "relative position bias of timm": bias,
        "rotary embedding of timm": rotary,
    }


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_bytes(run: Callable[[], object]) -> int:
    """The largest sum of the memory that torch allocated and freed on a CPU while it ran."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False
    ) as recorded:
        run()
    held = peak = 0
    events = recorded.profiler.kineto_results.events()  # in no order
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 512])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print("| network | tokens | inference | training step | peak memory of a step |")
    print("|---|--:|--:|--:|--:|")
    for size in options.sizes:
        images = torch.randn(max(1, 4 * 224**2 // size**2), 3, size, size)
        rows = networks(size)
        times: dict[tuple[str, str], list[float]] = {}

        def step(network: nn.Module, images: torch.Tensor = images) -> None:
            network.train()(images).square().sum().backward()

        @torch.inference_mode()
        def infer(network: nn.Module, images: torch.Tensor = images) -> None:
            network.eval()(images)

        for turn in range(options.rounds):
            for name, network in rows.items():
                for kind, run in (("inference", infer), ("step", step)):
                    taken = seconds(lambda run=run, network=network: run(network))
                    if turn:
                        times.setdefault((name, kind), []).append(taken)
        memory = {
            name: peak_bytes(lambda network=network: step(network))
            for name, network in rows.items()
        }
        for name in rows:
            infers, steps = (
                min(times[name, kind]) / min(times[PLAIN, kind]) for kind in ("inference", "step")
            )
            ratio = memory[name] / memory[PLAIN]
            side = size // SIZES["patch_size"]
            print(
                f"| {name} | {side}x{side} | {infers:.2f}x | {steps:.2f}x | {ratio:.2f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
