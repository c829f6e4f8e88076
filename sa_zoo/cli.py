"""The `sa-zoo` command: one short function per verb, which prints what a function of the package returns.

Each verb imports what it needs, so that help and error messages appear immediately.
"""

import json
import logging
import runpy
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sa_zoo
from sa_zoo.data.progress import CONTROL, is_main_process
from sa_zoo.extras import explained


def echo(text: object, err: bool = False) -> None:
    typer.echo(CONTROL.sub("", str(text)), err=err)


class Printable(logging.Formatter):
    """Messages without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return CONTROL.sub("", super().format(record))


class Commands(TyperGroup):
    """One error handler around all verbs.

    A user's mistake becomes its message and exit code 1, an interrupted run says how to resume it, and an unforeseen
    error is one line, too, with the place where it happened.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.arguments = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            echo(f"stopped by Ctrl-C {error}".rstrip(), err=True)
            raise typer.Exit(130) from error
        except Exception as error:
            of_typer = isinstance(error, typer.Abort) or hasattr(error, "exit_code")
            of_a_script = ctx.invoked_subcommand == "run"
            if of_typer or of_a_script or sys.flags.dev_mode:
                raise
            message, code = self._explained(error)
            echo(message, err=True)
            raise typer.Exit(code) from error

    def _explained(self, error: Exception) -> tuple[str, int]:
        """The message for an error, and the exit code."""
        from sa_zoo.training.progress import Interrupted

        typed = shlex.join(self.arguments)
        if isinstance(error, Interrupted):
            if "--resume" not in self.arguments:
                typed += " --resume"
            return f"{error}\nresume with: sa-zoo {typed}", 130
        if isinstance(error, (ValueError, OSError, FloatingPointError)):
            return f"error: {error}", 1
        if isinstance(error, ModuleNotFoundError):
            return f"error: {explained(error)}", 1
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}"
        shows = f"python -X dev -m sa_zoo {typed} shows the traceback"
        return f"error: {where}: {error}; {shows}", 1


app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(help="Model folder, hf-hub:OWNER/NAME or timm name with weights.")
]
NewFolder = Annotated[Path, typer.Option(help="Folder to write.")]
Data = Annotated[
    str, typer.Option(help="Hub data set, folder or digits (default: the data of the run).")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Replace a value: section.key=value.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]


def print_once(text: str) -> None:
    """Print in the main process of those that `accelerate launch` started."""
    if is_main_process():
        echo(text)


def show_version(wanted: bool) -> None:
    if wanted:
        echo(sa_zoo.__version__)
        raise typer.Exit


WELCOME = """\
sa_zoo: self-attention that can express convolution, for timm and Hugging Face
  sa-zoo explore sa_quadratic_tiny_cifar                a page in which to look at one
  sa-zoo train quickstart                               train a network in a minute
  sa-zoo train photographs --data FOLDER                fine-tune on your images
  sa-zoo --help                                         all commands"""


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, evaluate, convert and publish self-attention networks that can express convolution."""
    for stream in (sys.stdout, sys.stderr):  # cp1252 has few characters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort:
        logging.lastResort.setFormatter(Printable())
    if context.invoked_subcommand is None:
        echo(WELCOME)


@app.command("data")
def data_command(
    name: Annotated[str, typer.Argument(help="Folder, Hub data set or digits.")],
    changes: Changes = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Print what training would make of a data set, and name all images that cannot be read."""
    from sa_zoo.commands.data import data_report
    from sa_zoo.data.splits import refuse_unreadable

    report = data_report(name, changes or [])
    echo(report.model_dump_json(indent=2) if json_ else report.text())
    refuse_unreadable(report.unreadable)


@app.command("train")
def train_command(
    config: Annotated[str, typer.Argument(help="Recipe: TOML file, or the name of one.")],
    out: Annotated[
        str, typer.Option(help="Run folder (default: runs/CONFIG or runs/CONFIG-MODEL).")
    ] = "",
    data: Annotated[
        str, typer.Option(help="Hub data set, folder or digits (default: the data of the recipe).")
    ] = "",
    model: Annotated[str, typer.Option(help="timm name: model.name of the recipe.")] = "",
    epochs: Annotated[int | None, typer.Option(help="train.epochs of the recipe.")] = None,
    lr: Annotated[float | None, typer.Option(help="optim.lr of the recipe.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="train.batch_size of the recipe.")] = None,
    changes: Changes = None,
    resume: Resume = False,
) -> None:
    """Train a model, evaluate it, and leave a run folder that timm and transformers load."""
    from sa_zoo.commands.train import summary, train_recipe

    run = train_recipe(config, out, data, changes or [], resume, model, epochs, lr, batch_size)
    print_once(summary(run))


@app.command("evaluate")
def evaluate_command(
    model: Model,
    data: Data = "",
    changes: Changes = None,
    json_: Annotated[
        Path | None,
        typer.Option(
            "--json", help="File to write the result to as well; MODEL/metrics.json is updated."
        ),
    ] = None,
    detail: Annotated[
        bool, typer.Option("--detail", help="Add accuracy per class and confusion.")
    ] = False,
) -> None:
    """Accuracy of a model on the test split of a data set."""
    from sa_zoo.folders.metrics import write_result

    metrics = sa_zoo.evaluate(model, data, changes or [], detail)
    print_once(json.dumps(metrics.measured(), indent=2))
    if json_ and is_main_process():
        write_result(json_, metrics)


@app.command("predict")
def predict_command(
    model: Model,
    files: Annotated[list[Path], typer.Argument(help="Images, or folders of images.")],
    top: Annotated[int, typer.Option(help="Name so many classes.", min=1)] = 5,
) -> None:
    """Name the most probable classes of images, with their probabilities."""
    from sa_zoo.commands.predict import predictions

    for line in predictions(model, files, top):
        echo(line)


@app.command("finish")
def finish_command(
    source: Annotated[
        Path, typer.Argument(help="Model folder, or checkpoint file of timm or the paper's code.")
    ],
    out: NewFolder,
    model: Annotated[
        str, typer.Option(help="timm name of a checkpoint that does not have it.")
    ] = "",
    classes: Annotated[
        str, typer.Option(help="Names of the classes: data set, or file with a line for each.")
    ] = "",
) -> None:
    """Make a complete folder of what transformers' Trainer, timm's train.py or the paper's code left."""
    sa_zoo.finish(source, out, model, classes)
    measure = f"sa-zoo evaluate {out} --data NAME --json {out}/metrics.json && sa-zoo card {out}"
    echo(f"the model is in {out}; to measure it: {measure}")


@app.command("convert")
def convert_command(
    source: Annotated[
        str,
        typer.Argument(help="CNN: a timm name with weights, hf-hub:OWNER/NAME or a model folder."),
    ],
    out: NewFolder,
    layers: Annotated[
        str, typer.Option(help="Names of layers, with wildcards, separated by commas.")
    ] = "*",
    alpha: Annotated[
        float, typer.Option(help="Sharpness of the heads; from 39 on they equal convolutions.")
    ] = 46.0,
) -> None:
    """Turn the convolutions of a trained CNN into multi-head self-attention, and report what that changed."""
    from sa_zoo.commands.convert import convert_model

    _, report = convert_model(source, out, layers, alpha)
    echo(report.table().rstrip())


@app.command("card")
def card_command(folder: Annotated[Path, typer.Argument(help="Model folder.")]) -> None:
    """Render README.md of a model folder from its files, with its figures."""
    from sa_zoo.commands.finish import finish
    from sa_zoo.publishing.card import write_card

    write_card(finish(sa_zoo.open(folder)))


@app.command("publish")
def publish_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained or converted model.")],
    repo_id: Annotated[str, typer.Option(help="Repository to publish to, as in you/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option(help="Tag to set after all checks, such as v1.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run the local checks only; send nothing.")
    ] = False,
) -> None:
    """Publish a model folder on the Hub, download it again and check it."""
    sa_zoo.publish(folder, repo_id, private, tag, dry_run)


@app.command("explore")
def explore_command(
    model: Model,
    image: Annotated[
        list[Path] | None, typer.Option(help="Show this picture; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("explorer.html"),
) -> None:
    """Write a page in which to explore the attention of a model, offline; without images, with two photographs."""
    from sa_zoo.commands.explore import explore_source

    page = explore_source(model, image).save(out)
    echo(f"{page}: {page.stat().st_size / 1e6:.2f} MB; open it in a browser")


@app.command("heads")
def heads_command(
    model: Model,
    data: Data = "",
) -> None:
    """Describe the attention heads of a model in a table."""
    from sa_zoo.commands.heads import measure_heads

    echo(measure_heads(model, data))


@app.command(
    "run",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def run_command(
    context: typer.Context,
    script: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="Python script; its arguments follow."),
    ],
) -> None:
    """Run a script with the models of sa_zoo registered, such as timm's own train.py and validate.py."""
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
