"""python scripts/bench.py MODEL... [--device cuda] [--compile default] [--side 24] [--layers X] [--json FILE]

Measures time and work of networks in every way to evaluate them, which take turns, beside a network of 3x3 convolutions
and a large product. To compare two versions of the code, alternate between two checkouts.
"""

import copy
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer
from runs import ALLOCATOR
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import Permute

import sa_zoo
from sa_zoo.fast.route import only
from sa_zoo.folders.write import write_json
from sa_zoo.models.network import attention_in
from sa_zoo.training.environment import environment

Run = Callable[[], object]
PHASES = ("inference, float32", "inference, bfloat16", "training, float32", "training, bfloat16")
FORMS = ("definition", "by axes")
PRODUCT = "a large product"  # whose rate is the most that a network can reach
COLUMNS = {"ms per image": "{:.3g}", "GMACs": "{:.2f}", "MiB": "{:.0f}", "of the product": "{:.0%}"}


def with_convolutions(network: Any) -> nn.Module:
    """A copy with 3x3 convolutions of the same channels in place of attention."""
    twin = copy.deepcopy(network)
    for path, layer in attention_in(twin.blocks).items():
        dim_in = layer.W_val.in_features // layer.num_heads
        convolution = nn.Conv2d(dim_in, layer.W_val.out_features, 3, padding=1)
        norm = nn.Identity() if isinstance(layer.W_out, nn.Linear) else layer.W_out
        # tokens are (B, H, W, D)
        mixing = nn.Sequential(Permute([0, 3, 1, 2]), convolution, Permute([0, 2, 3, 1]), norm)
        twin.blocks.set_submodule(path, mixing)
    return twin


def step(network: Any, x: Tensor, phase: str, form: str = "") -> Run:
    """Inference, or a forward and backward pass, in which all layers of attention have this form if there is one."""
    half = torch.autocast(x.device.type, torch.bfloat16, enabled="bfloat16" in phase)

    def run() -> None:
        with only(form) if form else nullcontext():
            if phase.startswith("inference"):
                with torch.no_grad(), half:  # FlopCounterMode fails in inference mode
                    network(x)
                return
            with half:
                loss = network(x).float().square().sum()
            loss.backward()
        network.zero_grad(set_to_none=True)

    return run


def subjects(
    model: str, phase: str, batch: int, device: str, side: int, layers: str, mode: str
) -> dict:
    """Runs by name; those of compiled networks only without a form."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {}
    if side:
        sizes["img_size"] = side * timm.create_model(model).reduction
    network: Any = timm.create_model(model, **sizes)
    networks = {"as built": network}
    attention = hasattr(network, "blocks") and bool(attention_in(network.blocks))
    if attention:
        networks["3x3 convolutions"] = with_convolutions(network)
        if phase.startswith("inference"):
            networks["deployed"] = reparameterize_model(copy.deepcopy(network))
    if layers:
        networks["as attention"] = sa_zoo.convert(network)[0]
        networks[f"{layers} at alpha 4"] = sa_zoo.convert(network, layers, alpha=4.0)[0]
    shape = (batch, *resolve_model_data_config(network)["input_size"][:1])
    size = getattr(network, "img_size", resolve_model_data_config(network)["input_size"][1:])
    x = torch.randn(*shape, *size, device=device).to(memory_format=torch.channels_last)
    found: dict[str, Run] = {}
    for name, each in networks.items():
        each.to(device, memory_format=torch.channels_last).train(phase.startswith("training"))
        found[name] = step(each, x, phase)
        if mode:
            compiled = torch.compile(each, mode=mode, dynamic=False)
            found[f"{name}, compiled"] = step(compiled, x, phase)
    for form in FORMS if attention else ():
        if form != "by axes" or all(
            each.separable for each in attention_in(network.blocks).values()
        ):
            found[form] = step(network, x, phase, form)
    side = 8192 if device == "cuda" else 1024
    dtype = torch.bfloat16 if "bfloat16" in phase else torch.float32
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    return found | {PRODUCT: lambda: matrix @ matrix}


def measure(runs: dict[str, Run], batch: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """A row per subject, with medians over the rounds; a first round, which warms up and compiles, is not counted."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in runs}
    work: dict[str, float] = {}
    memory = dict.fromkeys(runs, 0)
    for name, run in runs.items():
        run()
        source = name.removesuffix(", compiled")  # compiled code hides its products
        if name == source:
            with FlopCounterMode(display=False) as counted:
                run()
            work[name] = counted.get_total_flops() / 2e9
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run()
            memory[name] = torch.cuda.max_memory_allocated()
    for _ in range(rounds):
        for name, run in runs.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    rows = []
    for name in runs:
        gmacs = work[name.removesuffix(", compiled")]
        share = gmacs / seconds[name] / (work[PRODUCT] / seconds[PRODUCT])
        images = 1 if name == PRODUCT else batch
        row = {"subject": name, "images": images, "milliseconds": 1e3 * seconds[name] / images}
        rows.append(row | {"gmacs": gmacs / images, "mib": memory[name] / 2**20, "share": share})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    keys = ("milliseconds", "gmacs", "mib", "share")
    lines = [["subject", *COLUMNS], ["---", *["--:"] * len(COLUMNS)]]
    for row in rows:
        cells = zip(COLUMNS.values(), keys, strict=True)
        lines.append([row["subject"], *(text.format(row[key]) for text, key in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="timm names.")],
    device: Annotated[str, typer.Option(help="Device to measure: cpu or cuda.")] = "cpu",
    batch: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 32,
    side: Annotated[list[int] | None, typer.Option(help="Grids of SIDE x SIDE tokens.")] = None,
    layers: Annotated[str, typer.Option(help="Layers of a CNN to convert at alpha 4.")] = "",
    phase: Annotated[str, typer.Option(help=f"First words of phases: {'; '.join(PHASES)}.")] = "",
    compile_: Annotated[str, typer.Option("--compile", help="A mode of torch.compile.")] = "",
    rounds: Annotated[int, typer.Option(help="Turns of each subject.", min=1)] = 5,
    json_: Annotated[Path | None, typer.Option("--json", help="File to add results to.")] = None,
) -> None:
    place = torch.device(device)
    conditions = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "rounds": rounds}
    conditions |= {"load": round(os.getloadavg()[0], 2), **environment(place)}
    command = shlex.join(["python", "scripts/bench.py", *sys.argv[1:]])
    run: dict[str, Any] = {"command": command, "conditions": conditions, "rows": []}
    found = json.loads(json_.read_text()) if json_ and json_.is_file() else {"runs": []}
    for model, each, grid in product(models, PHASES, side or [0]):
        if each.startswith(phase):
            name = f"{model}, {grid}x{grid} tokens" if grid else model
            rows = measure(
                subjects(model, each, batch, device, grid, layers, compile_), batch, rounds, device
            )
            run["rows"] += [{"model": name, "phase": each, **row} for row in rows]
            print(f"{name}, {each}\n\n{table(rows)}\n", flush=True)
            if json_:  # after each case, as the next may not fit
                write_json(json_, found | {"runs": [*found["runs"], run]})


if __name__ == "__main__":
    # glibc reads these when a process starts
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    app()
