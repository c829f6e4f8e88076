"""python scripts/bench.py MODEL... [--against CNN] [--side 64] [--routes] [--convolutions] [--recipe tiny] [--json F]

Measures time, memory and work of models, each against a yardstick that takes turns with it; docs/benchmarks.md defines
the columns and has the results. Every option that says "also" adds cases; with one of them, MODEL may be left out.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import suites
import torch
import typer
from benchmark import Case, run_cases
from timing import device_named

import sa_zoo  # noqa: F401  registers the names

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def bench(
    models: Annotated[
        list[str] | None, typer.Argument(help="timm names (default: sa_quadratic_cifar).")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda, ...")] = "cpu",
    batch: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 32,
    side: Annotated[
        list[int] | None, typer.Option(help="Also measure one layer on SIDE x SIDE tokens.", min=1)
    ] = None,
    phase: Annotated[
        str, typer.Option(help="First words of the phases to measure: inference, training, ...")
    ] = "",
    compile_: Annotated[
        str, typer.Option("--compile", help="Also measure torch.compile in this mode.")
    ] = "",
    against: Annotated[
        str, typer.Option(help="CNN that MODEL is measured against, instead of its definition.")
    ] = "",
    routes: Annotated[
        bool, typer.Option("--routes", help="Also measure every evaluation route, on a CPU.")
    ] = False,
    convolutions: Annotated[
        bool,
        typer.Option("--convolutions", help="Also measure convolutions as attention, on a CPU."),
    ] = False,
    recipe: Annotated[
        str, typer.Option(help="Also measure training steps of a recipe with their images.")
    ] = "",
    threads: Annotated[int, typer.Option(help="Number of CPU threads; all cores if 0.", min=0)] = 0,
    rounds: Annotated[
        int, typer.Option(help="Number of turns that each subject takes.", min=1)
    ] = 5,
    json: Annotated[
        Path | None, typer.Option(help="File to add the results of this run to.")
    ] = None,
) -> None:
    if not (models or routes or convolutions or recipe):
        models = ["sa_quadratic_cifar"]
    models = models or []
    suites.check_names([*models, *filter(None, [against])], phase)
    if side and not models:
        raise ValueError("--side: got no MODEL, expected one of attention")
    if threads:
        torch.set_num_threads(threads)
    place = device_named(device, compile_)

    def cases() -> Iterator[Case]:
        found = suites.models(models, batch, place, compile_)
        if against:
            found = suites.against(against, models, batch, place)
        for case in found:
            if case.phase.startswith(phase):
                yield case
        if side:
            pair = {"as built": "", "definition": "definition"}
            yield from suites.layers(models[0], side, place, pair)
        if routes:
            yield from suites.routes()
        if convolutions:
            yield from suites.convolutions()
        if recipe:
            yield suites.recipe(recipe, place)

    command = shlex.join(["python", "scripts/bench.py", *sys.argv[1:]])
    run_cases(list(cases()), rounds, place, command, json)


if __name__ == "__main__":
    app()
