"""Time, memory and work of networks, as ratios within one run whose measurements take turns.

Absolute times drift from hour to hour; what is to be compared is therefore run in turns, and the median over the rounds
of its ratio to the yardstick is what counts.
"""

import copy
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
)
YARDSTICK = "explicit"  # name of the network that ratios are taken to
MAPS = 2**32  # bytes of attention maps that are not built any more
Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One network in one phase.

    milliseconds: median for one image. mib: the most that a step adds to the weights, for one image.
    gmacs: multiply-adds (1e9) that the step executes for one image; ceiling: their share of what the machine's
    fastest matrix product does in that time. speed, memory: relative to the yardstick of the phase; None without one.
    """

    model: str
    phase: str
    network: str
    batch: int
    milliseconds: float
    mib: float
    gmacs: float
    ceiling: float
    speed: float | None
    memory: float | None


def phases(networks: dict[str, nn.Module]) -> Iterator[tuple[str, dict[str, nn.Module], torch.dtype]]:
    """What is measured of networks {name: network}: phase, the networks with their names, and their type."""
    evaluated = {name: copy.deepcopy(network).eval() for name, network in networks.items()}
    yield PHASES[0], evaluated, torch.float32
    halves = {name: copy.deepcopy(network).bfloat16() for name, network in evaluated.items()}
    whole = {YARDSTICK: evaluated[YARDSTICK]} if YARDSTICK in evaluated else {}
    yield PHASES[1], halves | whole, torch.bfloat16
    trained = {name: copy.deepcopy(network).train() for name, network in networks.items() if name != "folded"}
    yield PHASES[2], trained, torch.float32
    dropping = {name: network for name, network in trained.items() if _with_dropout(network)}
    if dropping:
        yield PHASES[3], dropping, torch.float32


def _with_dropout(network: nn.Module) -> bool:
    """Sets the paper's dropout on attention probabilities, where there are any."""
    layers = [module for name, module in network.named_modules() if name.endswith("attn_drop")]
    for layer in layers:
        layer.p = 0.1
    return bool(layers)


def bench(model: str, networks: dict[str, nn.Module], images: Tensor, rounds: int, phase_prefix: str = "") -> list[Row]:
    """Measure networks beside each other.

    Args:
        model: what the rows are filed under.
        networks: {name: network}, on the device and in the layout of `images`; ratios are to the one named "explicit".
        images: (B, C, H, W), float32.
        rounds: turns taken after one that is not counted.
        phase_prefix: how the names of the phases to measure begin.
    """
    rows, ceilings = [], {}
    for phase, present, dtype in phases(networks):
        if not phase.startswith(phase_prefix):
            continue
        runs = {name: _step(network, images.to(next(network.parameters()).dtype)) for name, network in present.items()}
        times = in_turns(runs, rounds, images.device)
        peaks = {name: peak_bytes(run, images.device) / len(images) for name, run in runs.items()}
        for name, run in runs.items():
            milliseconds = 1e3 * statistics.median(times[name]) / len(images)
            with FlopCounterMode(display=False) as counted:
                run()
            gmacs = counted.get_total_flops() / 2e9 / len(images)
            own = next(present[name].parameters()).dtype
            if own not in ceilings:
                ceilings[own] = ceiling(own, images.device)
            rows.append(
                Row(
                    model=model,
                    phase=phase,
                    network=name if own == dtype else f"{name}, float32",
                    batch=len(images),
                    milliseconds=milliseconds,
                    mib=peaks[name] / 2**20,
                    gmacs=gmacs,
                    ceiling=gmacs / (milliseconds / 1e3) / ceilings[own],
                    speed=_speed(times, name),
                    memory=peaks[name] / peaks[YARDSTICK] if YARDSTICK in peaks else None,
                )
            )
    return rows


def _speed(times: dict[str, list[float]], name: str) -> float | None:
    if YARDSTICK not in times:
        return None
    return statistics.median(other / mine for mine, other in zip(times[name], times[YARDSTICK], strict=True))


def _inference(network: nn.Module, x: Tensor) -> Run:
    def infer() -> None:
        with torch.inference_mode():
            network(x)

    return infer


def _step(network: nn.Module, images: Tensor) -> Run:
    """Inference, or forward and backward if the network is in training mode."""
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        cross_entropy(network(images), labels).backward()

    return train if network.training else _inference(network, images)


def in_turns(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each run in each round; a first round warms up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(run: Run, device: torch.device) -> int:
    """The most memory that a run holds at a time beyond what was held before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    # The profiler's tables only sum allocations up; the peak is in their order.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def ceiling(dtype: torch.dtype, device: torch.device, size: int = 2048) -> float:
    """GMAC/s of the fastest square matrix product of this machine: torch's own, or a 1x1 convolution."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    image, kernel = a.view(16, 1, -1, size).permute(0, 3, 1, 2), b[:, :, None, None]
    runs = {"product": lambda: linear(a, b), "convolution": lambda: torch.conv2d(image, kernel)}
    with torch.inference_mode():
        times = in_turns(runs, 5, device)
    return size**3 / 1e9 / min(itertools.chain(*times.values()))


@dataclass(frozen=True)
class Growth:
    """One layer on images of side x side tokens: microseconds and bytes for one token."""

    network: str
    side: int
    microseconds: float
    bytes: float


def growth(
    layers_for: Callable[[int], dict[str, nn.Module]], sides: list[int], rounds: int, device: torch.device
) -> list[Growth]:
    """How a layer (1, S, S, D) -> (1, S, S, D) grows with the number of tokens, at inference.

    Args:
        layers_for: {name: layer} for S; the explicit one is left out where its maps alone would fill MAPS bytes.
    """
    rows = []
    for side in sides:
        layers = layers_for(side)
        channels = layers[YARDSTICK].W_val.out_features
        num_heads = layers[YARDSTICK].W_val.in_features // channels
        if 4 * num_heads * side**4 > MAPS:
            del layers[YARDSTICK]
        X = torch.randn(1, side, side, channels, device=device)
        runs = {name: _inference(layer.to(device), X) for name, layer in layers.items()}
        times = in_turns(runs, rounds, device)
        for name, run in runs.items():
            seconds = statistics.median(times[name])
            rows.append(Growth(name, side, 1e6 * seconds / side**2, peak_bytes(run, device) / side**2))
    return rows


def growth_table(rows: list[Growth]) -> str:
    """Growth as a Markdown table."""
    lines = ["| layer | tokens | us a token | KiB a token |", "|---|--:|--:|--:|"]
    for row in rows:
        tokens, kib = f"{row.side}x{row.side}", row.bytes / 2**10
        lines.append(f"| {row.network} | {tokens} | {row.microseconds:.2f} | {kib:.1f} |")
    return "\n".join(lines)


def device_named(name: str) -> torch.device:
    """A device whose clock and memory can be read; ValueError for any other one, or one that is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device: got {name!r}, expected one that is at hand: {reason}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, expected cpu or cuda, which can be measured")
    return device


def conditions(device: torch.device, rounds: int) -> dict[str, object]:
    """What a figure has to be read with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| model | phase | network | ms an image | MiB an image | GMACs | of the ceiling | speed | memory |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ratios = ["" if ratio is None else f"{ratio:.2f}x" for ratio in (row.speed, row.memory)]
        lines.append(
            f"| {row.model} | {row.phase} | {row.network} | {row.milliseconds:.2f} | {row.mib:.1f} | {row.gmacs:.2f} "
            f"| {row.ceiling:.0%} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def results(rows: list[Row], layers: list[Growth], conditions: dict[str, object]) -> dict[str, object]:
    """All of it, for JSON."""
    return {"conditions": conditions, "networks": [asdict(row) for row in rows], "layer": [asdict(r) for r in layers]}
