"""The command `sa-zoo`. Each command imports what it needs, so that help and mistakes answer at once."""

import json
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, over the config's own.")]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see configs/.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/CONFIG if not given.")] = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in the folder stands.")] = False,
) -> None:
    """Train a model, evaluate it, and leave a run folder that timm loads."""
    from sa_zoo.training.loop import Interrupted

    out = out or Path("runs") / config.stem
    try:
        _told(_train, config, out, set_ or [], resume)
    except Interrupted as stopped:
        again = ["sa-zoo", "train", str(config), "--out", str(out)]
        again += [part for override in set_ or [] for part in ("--set", override)]
        typer.echo(f"{stopped}\nresume with: {shlex.join([*again, '--resume'])}", err=True)
        raise typer.Exit(130) from stopped


def _train(config: Path, out: Path, overrides: list[str], resume: bool) -> None:
    from accelerate import PartialState

    from sa_zoo.training.config import load_config
    from sa_zoo.training.train import fit

    metrics = fit(load_config(config, overrides), out, resume)
    if PartialState().is_main_process:
        _finish_folder(out)
        test, spent = metrics["test"], metrics["train"]
        typer.echo(
            f"{metrics['model']} on {metrics['data']}: test accuracy {test['top1']:.4f} (n = {test['n']}) "
            f"after {spent['epochs']} epochs, {spent['seconds'] / 60:.1f} minutes\n"
            f"the run is in {out}; next: sa-zoo evaluate {shlex.quote(str(out))} --detail, or in Python\n"
            f"  import timm, sa_zoo; timm.create_model('local-dir:{out}', pretrained=True)"
        )


def _finish_folder(folder: Path) -> None:
    """Make a folder that timm loads one that transformers loads too, with its card and the card's figures."""
    from sa_zoo.analysis.figures import draw_figures
    from sa_zoo.interchange.transformers_export import export_for_transformers
    from sa_zoo.publishing.card import write_card

    export_for_transformers(folder)
    draw_figures(folder)
    write_card(folder)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Run folder, hf-hub:OWNER/NAME or timm name with weights.")],
    data: Annotated[str, typer.Option(help="Hub data set, folder or digits; the run's own if not given.")] = "",
    revision: Annotated[str, typer.Option(help="Of a Hub data set.")] = "",
    label_column: Annotated[str, typer.Option(help="Where the data set has several.")] = "",
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    detail: Annotated[bool, typer.Option("--detail", help="Per class, calibration and confusion matrix.")] = False,
) -> None:
    """Accuracy of a model on the test split of a data set."""
    _told(_evaluate, model, data, revision, label_column, json_, detail)


def _evaluate(model: str, data: str, revision: str, label_column: str, json_: Path | None, detail: bool) -> None:
    from accelerate import PartialState

    from sa_zoo.training.checkpoint import write_json
    from sa_zoo.training.config import DataConfig, load_config
    from sa_zoo.training.evaluate import evaluate_source

    if data:
        config = DataConfig(name=data, revision=revision, label_column=label_column)
    elif (Path(model) / "train.toml").is_file():
        config = load_config(Path(model) / "train.toml").data
    else:
        raise ValueError(f"--data: got nothing, expected a data set, as {model} is no run folder")
    result = evaluate_source(model, config, detail)
    if PartialState().is_main_process:
        if json_:
            write_json(json_, result)
        typer.echo(json.dumps(result, indent=2))


@app.command("convert-reference")
def convert_reference(
    checkpoint: Annotated[Path, typer.Argument(help="Of the paper's own code.")],
    model: Annotated[str, typer.Option(help="timm name of the variant that it holds.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Turn a checkpoint of the paper's own code into a folder that timm and transformers load."""
    _told(_convert_reference, checkpoint, model, out)


def _convert_reference(checkpoint: Path, model: str, out: Path) -> None:
    from sa_zoo.interchange.paper_checkpoint import convert_reference

    convert_reference(checkpoint, model, out)
    _finish_folder(out)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="CNN: a timm name with weights, hf-hub:OWNER/NAME or a run folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    layers: Annotated[str, typer.Option(help="Names of layers, with wildcards, commas between patterns.")] = "*",
    alpha: Annotated[float, typer.Option(help="Sharpness of the heads; above 38 they are convolutions.")] = 46.0,
    content: Annotated[bool, typer.Option("--content", help="Add gated content terms; with a small alpha.")] = False,
    data: Annotated[str, typer.Option(help="Also measure accuracy on its test split, before and after.")] = "",
) -> None:
    """Turn the convolutions of a trained CNN into multi-head self-attention, and report what that changed."""
    _told(_convert, source, out, layers, alpha, content, data)


def _convert(source: str, out: Path, layers: str, alpha: float, content: bool, data: str) -> None:
    from sa_zoo.interchange.converted_cnn import convert_to_folder
    from sa_zoo.training.checkpoint import write_json
    from sa_zoo.training.config import DataConfig
    from sa_zoo.training.evaluate import evaluate_source

    report = convert_to_folder(source, out, layers, alpha, content)
    typer.echo(report.table())
    if data:
        before, after = (evaluate_source(model, DataConfig(name=data)) for model in (source, str(out)))
        measured = json.loads((out / "metrics.json").read_text())
        measured |= {"data": after["data"], "test": after["test"]}
        measured["baseline"] = {"model": source, "test": before["test"]}
        write_json(out / "metrics.json", measured)
        typer.echo(f"test accuracy {before['test']['top1']:.4f} before, {after['test']['top1']:.4f} after")
    _finish_folder(out)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="Run folder; or model_cards, for the cards of all models.")],
    baseline: Annotated[Path | None, typer.Option(help="Run on the same data to print beside this one.")] = None,
) -> None:
    """Render README.md of a model folder from what lies in it, with its figures."""
    _told(_card, folder, baseline)


def _card(folder: Path, baseline: Path | None) -> None:
    from sa_zoo.publishing.card import name_baseline
    from sa_zoo.publishing.catalogue import write_catalogue

    if not folder.is_dir():
        raise FileNotFoundError(f"folder: got {folder}, expected the folder of a model")
    if folder.name == "model_cards":
        write_catalogue(folder)
        return
    if baseline:
        name_baseline(folder, baseline)
    _finish_folder(folder)


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a converted model's with metrics.json.")],
    repo_id: Annotated[str, typer.Option(help="Where to, as in you/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Of a repository that this creates.")] = False,
    tag: Annotated[str | None, typer.Option(help="Such as v1; set last, on what was checked.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all that needs no network; send nothing.")] = False,
) -> None:
    """Publish a model folder on the Hub, and check it from the outside."""
    _told(_publish, folder, repo_id, private, tag, dry_run)


def _publish(folder: Path, repo_id: str, private: bool, tag: str | None, dry_run: bool) -> None:
    from sa_zoo.publishing.folder import check_complete
    from sa_zoo.publishing.hub import publish

    check_complete(folder)
    if not (folder / "README.md").is_file():
        _finish_folder(folder)
    try:
        publish(folder, repo_id, private, tag, dry_run)
    except RuntimeError as refused:  # by the Hub, with what to do
        raise OSError(refused) from refused


@app.command()
def bench(
    models: Annotated[list[str] | None, typer.Argument(help="timm names; sa_quadratic_cifar if none.")] = None,
    suite: Annotated[
        str, typer.Option(help="What to measure: models, routes (of attention) or convolution (as attention).")
    ] = "models",
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda, ...")] = "cpu",
    batch: Annotated[int, typer.Option(help="Images per batch, of the suite models.", min=1)] = 32,
    side: Annotated[
        list[int] | None, typer.Option(help="Also measure one layer of the first model on SIDE x SIDE tokens.", min=1)
    ] = None,
    phase: Annotated[str, typer.Option(help="First words of the phases to measure: inference, training, ...")] = "",
    compile_: Annotated[str, typer.Option("--compile", help="Also measure torch.compile in this mode.")] = "",
    threads: Annotated[int, typer.Option(help="Number of CPU threads; all cores if 0.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Number of turns that each subject takes.", min=1)] = 5,
    json_: Annotated[Path | None, typer.Option("--json", help="File to add the results of this run to.")] = None,
) -> None:
    """Measure time, memory and work of models, each against a yardstick that takes turns with it."""
    _told(
        _bench,
        models or ["sa_quadratic_cifar"],
        suite,
        device,
        batch,
        side or [],
        phase,
        compile_,
        threads,
        rounds,
        json_,
    )


def _bench(
    models: list[str],
    suite: str,
    device: str,
    batch: int,
    sides: list[int],
    phase: str,
    compile_mode: str,
    threads: int,
    rounds: int,
    json_: Path | None,
) -> None:
    import timm
    import torch

    import sa_zoo  # noqa: F401  registers the names
    from sa_zoo.analysis import suites, timing
    from sa_zoo.analysis.benchmark import run_cases

    if unknown := [name for name in models if not timm.is_model(name)]:
        ours = ", ".join(timm.list_models(module="timm_models"))
        raise ValueError(f"MODEL: got {unknown[0]!r}, expected a name that timm lists, such as {ours}")
    if suite not in ("models", "routes", "convolution"):
        raise ValueError(f"--suite: got {suite!r}, expected models, routes or convolution")
    if not any(known.startswith(phase) for known in suites.PHASES):
        raise ValueError(f"--phase: got {phase!r}, expected the beginning of one of {', '.join(suites.PHASES)}")
    if compile_mode and compile_mode not in suites.COMPILE_MODES:
        raise ValueError(f"--compile: got {compile_mode!r}, expected one of {', '.join(suites.COMPILE_MODES)}")
    if threads:
        torch.set_num_threads(threads)
    place = timing.device_named(device)
    if compile_mode:
        timing.check_compiler(place)
    chosen = {"models": lambda: suites.models(models, batch, place, compile_mode)}
    chosen |= {"routes": lambda: suites.routes(place), "convolution": lambda: suites.convolution(place)}
    cases = [case for case in chosen[suite]() if case.phase.startswith(phase)]
    cases += suites.layers(models[0], sides, place, {"as built": None, "definition": "definition"})
    run_cases(cases, rounds, place, shlex.join(["sa-zoo", *sys.argv[1:]]), json_)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(
    context: typer.Context, script: Annotated[Path, typer.Argument(help="Any Python script; its arguments follow.")]
) -> None:
    """Run a script with the names of sa_zoo registered, such as timm's own train.py and validate.py."""
    if not script.is_file():
        typer.echo(f"script: got {script}, expected a Python file", err=True)
        raise typer.Exit(2)
    import sa_zoo  # noqa: F401  registers the names

    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _told(command: Callable[..., None], *arguments: object) -> None:
    """Runs a command; a mistake of the user becomes its message, whatever else keeps its traceback."""
    try:
        command(*arguments)
    except (ValueError, OSError, FloatingPointError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
