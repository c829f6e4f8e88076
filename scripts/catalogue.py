"""python scripts/catalogue.py add RUNS/NAME-SEED --data DATA | render | publish [NAME...] --owner OWNER

Keeps model_cards/: the results of all runs in results/runs.toml, and one folder per model with weights. `add` files a
run as its row says: seed 0 of a row with weights with weights, card and figures, any other run with its metrics only.

A folder has what cannot be made again: weights, measurements, figures, the card. Code and the explorer's page are added
when a copy is finished (`sa-zoo card COPY`), which `publish` does; code alone is added by `sa-zoo publish`.
"""

import hashlib
import shutil
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from runs import MODEL_CARDS, read_runs
from safetensors.torch import load_file, save

from sa_zoo.commands.finish import finish
from sa_zoo.data.config import DataConfig
from sa_zoo.folders.metrics import Baseline, Scores, read_metrics, write_metrics
from sa_zoo.folders.write import SUMS, read_json, write_file, write_json
from sa_zoo.opened import open_model
from sa_zoo.publishing.card import write_card
from sa_zoo.publishing.folder import check_loads, read_manifest
from sa_zoo.publishing.hub import publish
from sa_zoo.publishing.transformers_export import transformers_files
from sa_zoo.training.config import data_of
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.training.run_folder import HEADS

FLOAT32_BYTES = 7_000_000  # larger files of weights are stored in bfloat16
RECORD_BYTES = 1_000_000  # larger records of heads, those of learned tables, are left out


def add_result(run: Path, entry: Path, recipe: str, seed: int) -> Path:
    """Add metrics.json of a finished run to the results of its model, but not its weights.

    `recipe` is "seed" for another seed of the run that the folder was made from. Returns the file. Raises ValueError,
    before anything is written, for a run that is not finished or of another model.
    """
    _check(run, entry)
    (entry / "results").mkdir(parents=True, exist_ok=True)
    path = entry / "results" / f"{recipe}-{seed}.json"
    unread = {"test": {"confusion_matrix"}}  # only figures of the folder's own run show it
    write_json(path, read_metrics(run).model_dump(exclude_none=True, exclude=unread))
    if (entry / "model.safetensors").is_file():
        write_card(open_model(entry))
    return path


def add_run(run: Path, entry: Path, data: DataConfig) -> Path:
    """Make the folder of a trained model from a finished run; the results that the folder had remain.

    Weights of more than FLOAT32_BYTES become bfloat16. The test split is evaluated again, in detail and with the
    weights as they are stored. Records of heads of more than RECORD_BYTES are left out. check.json gets the sha256 of
    the weights and the logits of two fixed images.
    Returns the folder. Raises ValueError for a run that is not finished, does not load or is of another model.
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
        record = new / HEADS
        if record.is_file() and record.stat().st_size > RECORD_BYTES:
            record.unlink()
        opened = open_model(new)
        opened.with_files(transformers_files(opened))
        large = (new / "model.safetensors").stat().st_size > FLOAT32_BYTES
        if large:
            _store_in_bfloat16(new)
        test = evaluate_opened(open_model(new), data, detail=True).test
        write_metrics(new, read_metrics(new).model_copy(update={"test": test}))
        opened = finish(open_model(new))
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
    """Render the card of every model with weights again, with the baseline of its row."""
    baselines = {row.name: row.baseline for row in read_runs()}
    cards = []
    for folder in _trained(model_cards):
        if baselines.get(folder.name):
            _name_baseline(folder, model_cards / baselines[folder.name])
        cards.append(write_card(open_model(folder)))
    return cards


def publish_models(folders: list[Path], owner: str, tag: str | None, dry_run: bool) -> None:
    """Publish models as OWNER/NAME, finished; all are checked before the first is sent."""
    with TemporaryDirectory() as temporary:
        finished = []
        for folder in folders:
            copy = shutil.copytree(folder, Path(temporary) / folder.name)
            finished.append(finish(open_model(copy)))
            write_card(finished[-1])  # with the page
        for check_only in [True] if dry_run else [True, False]:
            for opened in finished:
                publish(opened, f"{owner}/{opened.local_folder.name}", False, tag, check_only)


def _trained(model_cards: Path) -> list[Path]:
    """All models with weights. Raises ValueError if there are none."""
    folders = sorted(path.parent for path in model_cards.glob("*/model.safetensors"))
    if not folders:
        raise ValueError(f"got {model_cards} without folders of trained models in it")
    return folders


def _name_baseline(folder: Path, baseline: Path) -> None:
    """Put the test result of another model into metrics.json. Raises ValueError for one on other images."""
    mine = read_metrics(folder)
    other = read_metrics(baseline)
    same = (mine.data, mine.data_revision or "") == (other.data, other.data_revision or "")
    if not (same and mine.test and other.test and mine.test.n == other.test.n):
        raise ValueError(f"got the baseline {baseline}, expected the test images of {folder}")
    recipe = tomllib.loads((baseline / "train.toml").read_text(encoding="utf-8"))
    named = Baseline(
        model=other.model or baseline.name,
        fine_tuned=bool(recipe["model"].get("init")),
        epochs=other.train.epochs if other.train else None,
        test=Scores(**other.test.model_dump(include={"n", "top1", "top5", "balanced", "loss"})),
    )
    write_metrics(folder, mine.model_copy(update={"baseline": named}))


def _check(run: Path, entry: Path) -> None:
    """Raise ValueError unless the run is finished, and of the model of the folder that it is to enter."""
    architecture = open_model(run).config["architecture"]
    if entry.name.partition(".")[0] != architecture:
        raise ValueError(f"got {run} of {architecture}, expected a run for {entry.name}")
    if not read_metrics(run).test:
        raise ValueError(f"got {run} without a test result, expected the folder of a finished run")


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


app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)


@app.command("add")
def add(
    run: Annotated[Path, typer.Argument(help="Folder NAME-SEED of a finished run.")],
    data: Annotated[str, typer.Option(help="Data to measure on (default: the run's).")] = "",
) -> None:
    """File a finished run as its row in results/runs.toml says."""
    name, _, seed = run.name.rpartition("-")
    rows = {row.name: row for row in read_runs()}
    if name not in rows or not seed.isdecimal():
        raise ValueError(f"got {run.name!r}, expected NAME-SEED with a NAME in results/runs.toml")
    row = rows[name]
    if not row.weights or seed != "0":
        typer.echo(add_result(run, row.folder, row.recipe or "seed", int(seed)))
        return
    trained = (run / "train.toml").is_file()  # and not converted
    source = data_of(run) if trained else DataConfig()
    typer.echo(add_run(run, row.folder, source.model_copy(update={"name": data or source.name})))


@app.command("render")
def render_cards() -> None:
    """Render the card of every model with weights again."""
    typer.echo("\n".join(map(str, render(MODEL_CARDS))))


@app.command("publish")
def publish_command(
    owner: Annotated[str, typer.Option(help="Owner of the repositories.")],
    names: Annotated[list[str] | None, typer.Argument(help="Models (default: all).")] = None,
    model_cards: Annotated[Path, typer.Option(help="Folder of the models.")] = MODEL_CARDS,
    tag: Annotated[str | None, typer.Option(help="Tag to set after all checks.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; send nothing.")] = False,
) -> None:
    """Publish models with weights as OWNER/NAME, after all are checked."""
    folders = [model_cards / name for name in names or []]
    publish_models(folders or _trained(model_cards), owner, tag, dry_run)


if __name__ == "__main__":
    app()
