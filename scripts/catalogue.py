"""python scripts/catalogue.py add RUN | render | publish --owner OWNER

Keeps model_cards/, which has one folder per model with weights or results:

  add runs/tiny --data DATA                    a run with seed 0: weights, card, figures
  add runs/seed1                               another seed of it: its results only
  add runs/short --recipe 8epochs              another recipe: its results only
  add runs/x --to model_cards/NAME.long        or with its weights, under a tag
  render                                       all cards again
  publish --owner OWNER --tag v1               every model with weights, as OWNER/NAME

A folder has what cannot be made again: weights, measurements, figures, the card. Code and the explorer's page are added
when a copy is finished (`sa-zoo card COPY`), which `publish` does; code alone is added by `sa-zoo publish`.
"""

import hashlib
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from safetensors.torch import load_file, save

from sa_zoo.folders.metrics import read_metrics, write_metrics
from sa_zoo.folders.opened import Opened, open_folder
from sa_zoo.folders.write import SUMS, read_json, write_file, write_json
from sa_zoo.interchange.transformers_export import transformers_files
from sa_zoo.publishing.card import write_card
from sa_zoo.publishing.folder import check_loads, read_manifest
from sa_zoo.publishing.hub import publish
from sa_zoo.training.config import DataConfig, data_of, load_config
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.verbs.finish import finish

MODEL_CARDS = Path(__file__).parents[1] / "model_cards"
FLOAT32_BYTES = 8_000_000  # larger files of weights are stored in bfloat16


def add_result(run: Path, entry: Path, recipe: str, seed: int) -> Path:
    """Add metrics.json of a finished run to the results of its model, but not its weights.

    `recipe` is a word, "seed" for another seed of the run that the folder was made from. Returns the file. Raises
    ValueError, before anything is written, if it is no word, for a run that is not finished, or for a foreign `entry`.
    """
    if not re.fullmatch(r"\w+", recipe):
        raise ValueError(f"--recipe: got {recipe!r}, expected a word")
    _check(run, entry)
    (entry / "results").mkdir(parents=True, exist_ok=True)
    path = entry / "results" / f"{recipe}-{seed}.json"
    write_json(path, read_metrics(run).measured())
    if (entry / "model.safetensors").is_file():
        write_card(open_folder(entry))
    return path


def add_run(run: Path, entry: Path, data: DataConfig) -> Path:
    """Make the folder of a trained model from a finished run; the results that the folder had remain.

    Weights of more than 8 MB become bfloat16. The test split is evaluated again, in detail and with the weights as they
    are stored. check.json gets their sha256 and the logits of two fixed images. Returns the folder. Raises ValueError
    for a run that is not finished or does not load, or an `entry` of another model or of something else.
    """
    _check(run, entry)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=entry.parent) as temporary:
        new = Path(temporary) / entry.name
        for name, content in read_manifest(run).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(new / name, content)
        if (entry / "results").is_dir():
            shutil.copytree(entry / "results", new / "results")
        opened = open_folder(new)
        opened.with_files(transformers_files(opened))
        if (new / "model.safetensors").stat().st_size > FLOAT32_BYTES:
            _store_in_bfloat16(new)
        test = evaluate_opened(open_folder(new), data, detail=True).test
        write_metrics(new, read_metrics(new).model_copy(update={"test": test}))
        opened = finish(open_folder(new))
        sha256 = hashlib.sha256((new / "model.safetensors").read_bytes()).hexdigest()
        logits = check_loads(opened.network, new).tolist()
        write_json(new / "check.json", {"sha256": sha256, "logits": logits})
        for added in [new / SUMS, new / "explorer.html", *new.glob("*.py")]:
            added.unlink(missing_ok=True)
        write_card(opened)  # without the page
        if entry.exists():
            entry.rename(Path(temporary) / "old")
        new.rename(entry)
    return entry


def render(model_cards: Path) -> list[Path]:
    """Render the card of every model with weights again."""
    return [write_card(opened) for opened in _trained(model_cards)]


def publish_all(model_cards: Path, owner: str, tag: str | None, dry_run: bool, merge: bool) -> None:
    """Publish every model with weights as OWNER/NAME, finished; all are checked before the first is sent."""
    with TemporaryDirectory() as temporary:
        finished = []
        for opened in _trained(model_cards):
            copy = Path(temporary) / opened.local_folder.name
            shutil.copytree(opened.local_folder, copy)
            finished.append(finish(open_folder(copy)))
        for opened in finished:
            publish(opened, f"{owner}/{opened.local_folder.name}", False, tag, True, merge)
        for opened in finished:
            if not dry_run:
                publish(opened, f"{owner}/{opened.local_folder.name}", False, tag, False, merge)


def _trained(model_cards: Path) -> list[Opened]:
    """All models with weights. Raises ValueError if there are none."""
    folders = sorted(path.parent for path in model_cards.glob("*/model.safetensors"))
    if not folders:
        raise ValueError(f"got {model_cards} without folders of trained models in it")
    return [open_folder(folder) for folder in folders]


def _check(run: Path, entry: Path) -> None:
    """Raise ValueError unless the run is finished, and `entry` empty, new or the folder of its model in a catalogue."""
    architecture = open_folder(run).config["architecture"]
    if not read_metrics(run).test:
        raise ValueError(f"got {run} without a test result, expected the folder of a finished run")
    names = {path.name for path in entry.iterdir()} if entry.exists() else set()
    in_catalogue = "check.json" in names or names <= {"results"}
    of_this_model = entry.name.partition(".")[0] == architecture
    if names and not (in_catalogue and of_this_model):
        raise ValueError(
            f"--to: got {entry}, expected a new folder or that of {architecture} in model_cards"
        )


def _store_in_bfloat16(folder: Path) -> None:
    """Halve the file of weights; both libraries compute in float32 with them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, value in weights.items():
        if value.is_floating_point():
            weights[name] = value.bfloat16()
    write_file(path, save(weights, {"format": "pt"}))
    # otherwise transformers takes the type of the file
    write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.command("add")
def add(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    to: Annotated[Path | None, typer.Option(help="Folder (default: model_cards/MODEL).")] = None,
    recipe: Annotated[str, typer.Option(help="Name of a recipe: adds the results only.")] = "",
    data: Annotated[str, typer.Option(help="Data to measure on (default: the run's).")] = "",
) -> None:
    """Add a finished run: seed 0 with its weights, another seed or another recipe with its results."""
    entry = to or MODEL_CARDS / str(read_json(run / "config.json").get("architecture"))
    trained = (run / "train.toml").is_file()  # and not converted
    seed = load_config(run / "train.toml").train.seed if trained else 0
    if recipe or seed:
        typer.echo(add_result(run, entry, recipe or "seed", seed))
        return
    source = data_of(str(run)) if trained else DataConfig()
    typer.echo(add_run(run, entry, source.model_copy(update={"name": data or source.name})))


@app.command("render")
def render_cards() -> None:
    """Render the card of every model with weights again."""
    typer.echo("\n".join(map(str, render(MODEL_CARDS))))


@app.command("publish")
def publish_models(
    owner: Annotated[str, typer.Option(help="Owner of the repositories.")],
    model_cards: Annotated[Path, typer.Option(help="Folder of the models.")] = MODEL_CARDS,
    tag: Annotated[str | None, typer.Option(help="Tag to set after all checks.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; send nothing.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Publish next to other work.")] = False,
) -> None:
    """Publish every model with weights as OWNER/NAME, after all are checked."""
    publish_all(model_cards, owner, tag, dry_run, merge)


if __name__ == "__main__":
    app()
