"""The verbs of `sa-zoo` that look at models: their attention, their runs and their speed. cli.py adds them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def explore(
    model: Annotated[str, typer.Argument(help="Model folder, hf-hub:OWNER/NAME or timm name with weights.")],
    images: Annotated[int, typer.Option(help="Show so many test images of the run's data.", min=0)] = 0,
    image: Annotated[list[Path] | None, typer.Option(help="Show this picture; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("explorer.html"),
) -> None:
    """Write a page in which to explore the attention of a model, offline; without images, with two photographs."""
    from sa_zoo.pages import explore_source

    page = explore_source(model, image, images).save(out)
    typer.echo(f"{page}: {page.stat().st_size / 1e6:.2f} MB; open it in a browser")


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; those that differ in their seed only are averaged.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write (default: figures/ of each run, and here).")] = None,
) -> None:
    """Draw figures of runs, and of several also those that compare them, as PNG and SVG."""
    import sa_zoo  # noqa: F401  registers the names
    from sa_zoo.analysis.figures import plot

    typer.echo("\n".join(map(str, plot(runs, out))))


def heads(
    model: Annotated[str, typer.Argument(help="Run folder, hf-hub:OWNER/NAME or timm name with weights.")],
    data: Annotated[str, typer.Option(help="Data set with test images (default: the data of the run).")] = "",
    window: Annotated[int, typer.Option(help="K of the K x K window, in pixels.")] = 3,
    convolve: Annotated[str, typer.Option(help="Replace layers by their nearest K x K convolutions: 3,5,7")] = "",
    prune: Annotated[
        bool, typer.Option("--prune", help="Write a model without the degenerate heads to --out.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Write one with these heads initialized again.")] = False,
    sharpness: Annotated[float, typer.Option(help="Degenerate: largest eigenvalue of 1/covariance below.")] = 1e-5,
    condition: Annotated[float, typer.Option(help="Degenerate: condition number above.")] = 1e3,
    out: Annotated[Path | None, typer.Option(help="Folder to write table and figure, or the new model, to.")] = None,
) -> None:
    """Describe attention heads, replace layers by convolutions, or prune or reset degenerate heads."""
    from sa_zoo.head_study import study

    typer.echo(study(model, data, window, convolve, prune, reset, sharpness, condition, out))


def bench(
    models: Annotated[list[str] | None, typer.Argument(help="timm names (default: sa_quadratic_cifar).")] = None,
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda, ...")] = "cpu",
    batch: Annotated[int, typer.Option(help="Images per batch.", min=1)] = 32,
    side: Annotated[list[int] | None, typer.Option(help="Also measure one layer on SIDE x SIDE tokens.", min=1)] = None,
    phase: Annotated[str, typer.Option(help="First words of the phases to measure: inference, training, ...")] = "",
    compile_: Annotated[str, typer.Option("--compile", help="Also measure torch.compile in this mode.")] = "",
    threads: Annotated[int, typer.Option(help="Number of CPU threads; all cores if 0.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Number of turns that each subject takes.", min=1)] = 5,
    json_: Annotated[Path | None, typer.Option("--json", help="File to add the results of this run to.")] = None,
) -> None:
    """Measure time, memory and work of models, each against a yardstick that takes turns with it."""
    import torch

    import sa_zoo  # noqa: F401  registers the names
    from sa_zoo.analysis import suites, timing
    from sa_zoo.analysis.benchmark import run_cases

    models = models or ["sa_quadratic_cifar"]
    suites.check_names(models, phase)
    if threads:
        torch.set_num_threads(threads)
    place = timing.device_named(device, compile_)
    cases = [case for case in suites.models(models, batch, place, compile_) if case.phase.startswith(phase)]
    cases += suites.layers(models[0], side or [], place, {"as built": "", "definition": "definition"})
    run_cases(cases, rounds, place, shlex.join(["sa-zoo", *sys.argv[1:]]), json_)
