"""Time, memory and work of networks, as ratios within one run whose measurements take turns.

What counts is the median over the rounds of a network's ratio to the yardstick.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from sa_zoo.analysis.timing import Run, in_turns, peak_bytes, products

PHASES = (
    "inference, float32",
    "inference, bfloat16",
    "training, float32",
    "training, float32, dropout on probabilities",
    "training, bfloat16",
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
YARDSTICK = "explicit"  # name of the network that ratios are taken to
EVALUATIONS = ("as built", "folded", YARDSTICK, "compiled")  # networks that compute the same
MAPS = 2**32  # bytes of attention maps that are not built any more
COUNTED = 16  # images of which work is counted: some of it is done once for all of them


@dataclass(frozen=True)
class Row:
    """One network in one phase.

    milliseconds: median for one image. mib: the most that a step adds to the weights, for one image; CUDA graphs hold
    theirs all the time, which does not count. gmacs: multiply-adds (1e9) that the step executes for one image, before
    compilation; needed: those that the leanest evaluation needs, in training three times as many as in inference.
    ceiling: share of the needed ones in what the machine's fastest matrix product does in that time. speed, memory:
    relative to the yardstick of the phase; None without one.
    """

    model: str
    phase: str
    network: str
    batch: int
    milliseconds: float
    mib: float
    gmacs: float
    needed: float
    ceiling: float
    speed: float | None
    memory: float | None


@dataclass(frozen=True)
class Subject:
    """A network to be measured, in the type of its products; `compiled` is what runs it if that is not itself."""

    network: nn.Module
    dtype: torch.dtype
    compiled: Callable[[Tensor], Tensor] | None = None


def phases(networks: dict[str, nn.Module], compile_mode: str = "") -> Iterator[tuple[str, dict[str, Subject]]]:
    """What is measured of networks {name: network}: phases, and in each the subjects by what they are called."""

    def subjects(present: dict[str, nn.Module], dtype: torch.dtype) -> dict[str, Subject]:
        found = {name: Subject(network, dtype) for name, network in present.items()}
        best = present.get("folded", present.get("as built"))
        if compile_mode and best is not None:
            torch.compiler.reset()  # it gives up compiling what it has compiled several times
            compiled = torch.compile(best, mode=compile_mode, dynamic=False, fullgraph=True)
            found["compiled"] = Subject(best, dtype, compiled)
        return found

    evaluated = {name: copy.deepcopy(network).eval() for name, network in networks.items()}
    yield PHASES[0], subjects(evaluated, torch.float32)
    halves = {name: copy.deepcopy(network).bfloat16() for name, network in evaluated.items() if name != YARDSTICK}
    reduced = subjects(halves, torch.bfloat16)
    if YARDSTICK in evaluated:
        reduced[f"{YARDSTICK}, float32"] = Subject(evaluated[YARDSTICK], torch.float32)
    yield PHASES[1], reduced
    trained = {name: copy.deepcopy(network).train() for name, network in networks.items() if name != "folded"}
    yield PHASES[2], subjects(trained, torch.float32)
    dropping = {name: copy.deepcopy(network) for name, network in trained.items()}
    dropping = {name: network for name, network in dropping.items() if _with_dropout(network)}
    if dropping:
        yield PHASES[3], subjects(dropping, torch.float32)
    yield PHASES[4], subjects(trained, torch.bfloat16)


def _with_dropout(network: nn.Module) -> bool:
    """Sets the paper's dropout on attention probabilities, where there are any."""
    layers = [module for name, module in network.named_modules() if name.endswith("attn_drop")]
    for layer in layers:
        layer.p = 0.1
    return bool(layers)


def bench(
    model: str,
    networks: dict[str, nn.Module],
    images: Tensor,
    rounds: int,
    phase_prefix: str = "",
    compile_mode: str = "",
) -> list[Row]:
    """Measure networks beside each other.

    Args:
        model: what the rows are filed under.
        networks: {name: network}, on the device and in the layout of `images`; ratios are to the one named "explicit".
        images: (B, C, H, W), float32.
        rounds: turns taken after one that is not counted.
        phase_prefix: how the names of the phases to measure begin.
        compile_mode: also measure the network as torch.compile makes it in this mode; not if empty.
    """
    rows, work = [], _work(networks, images[:COUNTED].cpu())
    for phase, present in phases(networks, compile_mode):
        if not phase.startswith(phase_prefix):
            continue
        runs = {name: _step(subject, images) for name, subject in present.items()}
        times, ceilings = _times(runs, {subject.dtype for subject in present.values()}, rounds, images.device)
        peaks = {name: peak_bytes(run, images.device) / len(images) for name, run in runs.items()}
        yardstick = next((name for name in present if name.startswith(YARDSTICK)), None)
        for name, subject in present.items():
            milliseconds = 1e3 * statistics.median(times[name]) / len(images)
            needed = _needed(name.partition(",")[0], work, subject.network.training)
            rows.append(
                Row(
                    model=model,
                    phase=phase,
                    network=name,
                    batch=len(images),
                    milliseconds=milliseconds,
                    mib=peaks[name] / 2**20,
                    gmacs=_gmacs(_step(Subject(subject.network, subject.dtype), images)) / len(images),
                    needed=needed,
                    ceiling=needed / (milliseconds / 1e3) / ceilings[subject.dtype],
                    speed=_speed(times[name], times[yardstick]) if yardstick else None,
                    memory=peaks[name] / peaks[yardstick] if yardstick else None,
                )
            )
    return rows


def _times(
    runs: dict[str, Run], dtypes: set[torch.dtype], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[torch.dtype, float]]:
    """Seconds of each run in each round, and GMAC/s of the fastest matrix product, which takes turns with them."""
    work, ways = {}, {}
    for dtype in dtypes:
        work[dtype], runs_of_it = products(dtype, device)
        ways[dtype] = {f"{dtype}, {number}": run for number, run in enumerate(runs_of_it)}
    times = in_turns(runs | {name: run for named in ways.values() for name, run in named.items()}, rounds, device)
    ceilings = {dtype: work[dtype] / min(min(times[name]) for name in ways[dtype]) for dtype in dtypes}
    return times, ceilings


def _speed(mine: list[float], yardstick: list[float]) -> float:
    return statistics.median(other / own for own, other in zip(mine, yardstick, strict=True))


def _gmacs(run: Run) -> float:
    """Multiply-adds (1e9) that a run executes."""
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops() / 2e9


def _work(networks: dict[str, nn.Module], images: Tensor) -> dict[str, float]:
    """GMACs of inference for one of the images on a CPU, whose evaluations are the leanest."""
    copies = {name: copy.deepcopy(network).to(images.device).eval() for name, network in networks.items()}
    return {name: _gmacs(_inference(network, images)) / len(images) for name, network in copies.items()}


def _needed(name: str, work: dict[str, float], training: bool) -> float:
    """GMACs of the leanest evaluation of what a network computes, folded only for inference."""
    same = [work[other] for other in EVALUATIONS if other in work and not (training and other == "folded")]
    return (min(same) if name in EVALUATIONS else work[name]) * (3 if training else 1)


def _inference(network: Callable[[Tensor], Tensor], x: Tensor) -> Run:
    def infer() -> None:
        with torch.inference_mode():
            network(x)

    return infer


def _step(subject: Subject, images: Tensor) -> Run:
    """Inference, or forward and backward if the network is in training mode; in half precision under autocast."""
    network = subject.network
    called = network if subject.compiled is None else subject.compiled
    weights = next(network.parameters()).dtype
    x = images.to(weights)
    if not network.training:
        return _inference(called, x)
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

    def train() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, subject.dtype, enabled=subject.dtype != weights):
            logits = called(x)
        cross_entropy(logits.float(), labels).backward()

    return train


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


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| model | phase | network | ms an image | MiB an image | GMACs | needed | of the ceiling | speed | memory |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ratios = ["" if ratio is None else f"{ratio:.2f}x" for ratio in (row.speed, row.memory)]
        lines.append(
            f"| {row.model} | {row.phase} | {row.network} | {row.milliseconds:.2f} | {row.mib:.1f} | {row.gmacs:.2f} "
            f"| {row.needed:.2f} | {row.ceiling:.0%} | {ratios[0]} | {ratios[1]} |"
        )
    return "\n".join(lines)


def results(rows: list[Row], layers: list[Growth], conditions: dict[str, object]) -> dict[str, object]:
    """All of it, for JSON."""
    return {"conditions": conditions, "networks": [asdict(row) for row in rows], "layer": [asdict(r) for r in layers]}
