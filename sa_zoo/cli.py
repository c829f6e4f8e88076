"""The `sa-zoo` command. Each verb imports what it needs, so that help and error messages appear immediately."""

import json
import runpy
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sa_zoo.training.progress import Interrupted


class Commands(TyperGroup):
    """One error handler around all verbs: a user's mistake becomes its message and exit code 1, an interrupted run says
    how to resume it, and what nobody foresaw is one line, too, with the place where it happened."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **settings: Any
    ) -> Any:
        self.arguments = list(args)
        return super().make_context(info_name, args, *more, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Interrupted as interrupted:
            again = self.arguments + ["--resume"] * ("--resume" not in self.arguments)
            typer.echo(f"{interrupted}\nresume with: {shlex.join(['sa-zoo', *again])}", err=True)
            raise typer.Exit(130) from interrupted
        except Exception as error:
            of_typer = isinstance(error, typer.Abort) or hasattr(
                error, "exit_code"
            )  # such as an unknown option
            if (
                of_typer or sys.flags.dev_mode or ctx.invoked_subcommand == "run"
            ):  # an error of the script
                raise
            message = str(error)
            if not isinstance(error, (ValueError, OSError, FloatingPointError)):
                place = traceback.extract_tb(error.__traceback__)[-1]
                message = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {error}"
                message += f"; python -X dev -m {shlex.join(['sa_zoo', *self.arguments])} shows how it came to that"
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(1) from error


HELP = "Train, evaluate, convert and publish self-attention networks that can express convolution."
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=HELP,
)


@app.command()
def train(
    config: Annotated[
        str, typer.Argument(help="TOML file, or the name of a recipe, such as quickstart.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/CONFIG or runs/CONFIG-MODEL).")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a value: section.key=value.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
) -> None:
    """Train a model, evaluate it, and leave a run folder that timm and transformers load."""
    from accelerate import PartialState

    from sa_zoo.training.config import load_config, run_name
    from sa_zoo.verbs.fit import fit

    out = out or Path("runs") / run_name(config, set_ or [])
    metrics = fit(load_config(config, set_ or []), out, resume)
    if PartialState().is_main_process:
        measured = metrics.measured()
        test, spent = (
            measured["test"],
            measured.get("train"),
        )  # not in metrics.json that only evaluation wrote
        after = (
            f" after {spent['epochs']} epochs, {spent['seconds'] / 60:.1f} minutes" if spent else ""
        )
        typer.echo(
            f"{metrics.model} on {metrics.data}: test accuracy {test['top1']:.4f} (n = {test['n']}){after}\n"
            f"the run is in {out}; next: sa-zoo evaluate {shlex.quote(str(out))} --detail, or in Python\n"
            f"  import timm, sa_zoo; timm.create_model('local-dir:{out}', pretrained=True)"
        )


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(help="Model folder, hf-hub:OWNER/NAME or timm name with weights.")
    ],
    data: Annotated[
        str, typer.Option(help="Hub data set, folder or digits (default: the data of the run).")
    ] = "",
    revision: Annotated[str, typer.Option(help="Revision of a Hub data set.")] = "",
    label_column: Annotated[
        str, typer.Option(help="Label column, if the data set has several.")
    ] = "",
    json_: Annotated[
        Path | None,
        typer.Option(
            "--json", help="File to write the result to as well; MODEL/metrics.json is updated."
        ),
    ] = None,
    detail: Annotated[
        bool, typer.Option("--detail", help="Add per-class accuracy, calibration, confusion.")
    ] = False,
) -> None:
    """Accuracy of a model on the test split of a data set."""
    from accelerate import PartialState

    from sa_zoo.folders.metrics import FILE, write_test
    from sa_zoo.folders.write import write_json
    from sa_zoo.training.config import DataConfig, data_of
    from sa_zoo.training.evaluate import evaluate_source

    given = {
        key: value
        for key, value in {"revision": revision, "label_column": label_column}.items()
        if value
    }
    config = (DataConfig(name=data) if data else data_of(model)).model_copy(update=given)
    metrics = evaluate_source(model, config, detail)
    if PartialState().is_main_process:
        measured = metrics.model_dump(exclude_none=True, exclude={"version"})
        typer.echo(json.dumps(measured, indent=2))
        folder = Path(model.removeprefix("local-dir:"))
        if json_ and json_.resolve() == (folder / FILE).resolve():
            write_test(folder, metrics)
        elif json_:
            write_json(json_, measured)


@app.command("convert-reference")
def convert_reference(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint that the paper's own code wrote.")],
    model: Annotated[str, typer.Option(help="timm name of the variant in the checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Turn a checkpoint of the paper's own code into a folder that timm and transformers load."""
    from sa_zoo.interchange.paper_checkpoint import convert_reference
    from sa_zoo.verbs.fit import finish_folder

    convert_reference(checkpoint, model, out)
    finish_folder(out)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="CNN: a timm name with weights, hf-hub:OWNER/NAME or a model folder."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    layers: Annotated[
        str, typer.Option(help="Names of layers, with wildcards, separated by commas.")
    ] = "*",
    alpha: Annotated[
        float, typer.Option(help="Sharpness of the heads; above 38 they equal convolutions.")
    ] = 46.0,
    content: Annotated[
        bool, typer.Option("--content", help="Add gated content terms; use a small alpha.")
    ] = False,
    data: Annotated[
        str, typer.Option(help="Data set on whose test split to measure accuracy before and after.")
    ] = "",
) -> None:
    """Turn the convolutions of a trained CNN into multi-head self-attention, and report what that changed."""
    from sa_zoo.folders.metrics import Baseline, write_test
    from sa_zoo.folders.write import new_folder
    from sa_zoo.interchange.converted_cnn import convert_to_folder
    from sa_zoo.publishing.card import architecture
    from sa_zoo.training.config import DataConfig, load_config
    from sa_zoo.training.evaluate import evaluate_source
    from sa_zoo.verbs.fit import finish_folder

    with new_folder(out) as new:
        typer.echo(convert_to_folder(source, new, layers, alpha, content).table())
        if data:
            run, config = Path(source) / "train.toml", DataConfig(name=data)
            if run.is_file() and (trained_on := load_config(run).data).name == data:
                config = trained_on  # with its title
            before, after = (evaluate_source(model, config) for model in (source, str(new)))
            assert before.test and after.test
            name = architecture(Path(source)) if Path(source).is_dir() else source
            write_test(new, after, baseline=Baseline(model=name, test=before.test))
            typer.echo(f"test accuracy {before.test.top1:.4f} before, {after.test.top1:.4f} after")
        finish_folder(new, out.name)


@app.command()
def card(
    folder: Annotated[
        Path, typer.Argument(help="Model folder; or model_cards, for the cards of all models.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="Run on the same data to print next to this one.")
    ] = None,
) -> None:
    """Render README.md of a model folder from its files, with its figures."""
    from sa_zoo.publishing.card import name_baseline, write_catalogue
    from sa_zoo.verbs.fit import finish_folder

    if not folder.is_dir():
        raise FileNotFoundError(f"folder: got {folder}, expected the folder of a model")
    if folder.name == "model_cards":
        write_catalogue(folder)
        return
    if baseline:
        name_baseline(folder, baseline)
    finish_folder(folder)


@app.command()
def publish(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a trained or converted model, or of many such folders."),
    ],
    repo_id: Annotated[str, typer.Option(help="Repository to publish to, as in you/NAME.")] = "",
    owner: Annotated[
        str, typer.Option(help="Publish all models in the folder, each as OWNER/NAME.")
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option(help="Tag to set after all checks, such as v1.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run the local checks only; send nothing.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Publish next to other work; replace equal names.")
    ] = False,
) -> None:
    """Publish a model folder on the Hub, download it again and check it."""
    from sa_zoo.publishing.hub import publish

    if bool(repo_id) == bool(owner):
        raise ValueError(
            f"--repo-id, --owner: got {repo_id!r} and {owner!r}, expected one of the two"
        )
    models = (
        sorted(path.parent for path in folder.glob("*/model.safetensors")) if owner else [folder]
    )
    if not models:
        raise ValueError(
            f"folder: got {folder} without folders of trained models in it, expected model_cards"
        )
    for dry in (
        [True, False] if owner and not dry_run else [dry_run]
    ):  # all are checked before the first is sent
        for model in models:
            publish(model, repo_id or f"{owner}/{model.name}", private, tag, dry, merge)


@app.command()
def explore(
    model: Annotated[
        str, typer.Argument(help="Model folder, hf-hub:OWNER/NAME or timm name with weights.")
    ],
    images: Annotated[
        int, typer.Option(help="Show so many test images of the run's data.", min=0)
    ] = 0,
    image: Annotated[
        list[Path] | None, typer.Option(help="Show this picture; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("explorer.html"),
) -> None:
    """Write a page in which to explore the attention of a model, offline; without images, with two photographs."""
    from sa_zoo.verbs.explore import explore_source

    page = explore_source(model, image, images).save(out)
    typer.echo(f"{page}: {page.stat().st_size / 1e6:.2f} MB; open it in a browser")


@app.command()
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; those that differ in their seed only are averaged."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write (default: figures/ of each run, and here).")
    ] = None,
) -> None:
    """Draw figures of runs, and of several also those that compare them, as PNG and SVG."""
    import sa_zoo  # noqa: F401  registers the names
    from sa_zoo.analysis.figures import plot

    typer.echo("\n".join(map(str, plot(runs, out))))


@app.command()
def heads(
    model: Annotated[
        str, typer.Argument(help="Run folder, hf-hub:OWNER/NAME or timm name with weights.")
    ],
    data: Annotated[
        str, typer.Option(help="Data set with test images (default: the data of the run).")
    ] = "",
    window: Annotated[int, typer.Option(help="K of the K x K window, in pixels.")] = 3,
    convolve: Annotated[
        str, typer.Option(help="Replace layers by their nearest K x K convolutions: 3,5,7")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write table and figure to.")] = None,
) -> None:
    """Describe attention heads, or replace layers by convolutions."""
    from sa_zoo.verbs.heads import study

    typer.echo(study(model, data, window, convolve, out))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def run(
    context: typer.Context,
    script: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Python script; its arguments follow."),
    ],
) -> None:
    """Run a script with the models of sa_zoo registered, such as timm's own train.py and validate.py."""
    import sa_zoo  # noqa: F401  registers the names

    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
