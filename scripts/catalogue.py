"""Adds finished runs to model_cards/, which has one folder per trained model: what is published, weights included."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save

from sa_zoo.folders.check import check_weights
from sa_zoo.folders.metrics import read_metrics, write_metrics
from sa_zoo.folders.write import SUMS, read_json, write_file, write_json
from sa_zoo.interchange.transformers_export import export_for_transformers
from sa_zoo.publishing.card import architecture, render_card, write_card
from sa_zoo.publishing.folder import check_complete, check_folder, read_manifest
from sa_zoo.training.config import DataConfig
from sa_zoo.training.evaluate import evaluate_source
from sa_zoo.verbs.fit import finish_folder

CODE = Path(__file__).parents[1] / "sa_zoo" / "models"
FLOAT32_BYTES = 8_000_000  # larger files of weights are stored in bfloat16


def add_result(run: Path, entry: Path, recipe: str, seed: int) -> Path:
    """Add metrics.json of a finished run to the results of its model, but not its weights.

    `recipe` is a word, "seed" for another seed of the run that the folder was made from. Returns the file. Raises
    ValueError, before anything is written, if it is no word, for a run that is not finished, or for a foreign `entry`.
    """
    if not re.fullmatch(r"\w+", recipe):
        raise ValueError(f"--recipe: got {recipe!r}, expected a word")
    _check(run, entry)
    render_card(entry)  # raises what would keep the new one from being written
    (entry / "results").mkdir(parents=True, exist_ok=True)
    path = write_json(entry / "results" / f"{recipe}-{seed}.json", read_metrics(run).measured())
    write_card(entry)
    return path


def add_run(run: Path, entry: Path, data: DataConfig) -> Path:
    """Make the folder of a trained model from a finished run; the results that the folder had remain.

    Weights of more than 8 MB become bfloat16. The test split is evaluated again, in detail and with the weights as they
    are stored. check.json gets their sha256 and the logits of two fixed images. The model's code is linked to that of
    this package. Returns the folder; raises ValueError for a run that is not finished or does not load, or an `entry`
    of another model or of something else.
    """
    _check(run, entry)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=entry.parent) as temporary:
        new = Path(temporary) / entry.name
        for name, content in read_manifest(run).items():
            if not name.endswith(".py"):
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(new / name, content)
        if (entry / "results").is_dir():
            shutil.copytree(entry / "results", new / "results")
        export_for_transformers(new)
        if (new / "model.safetensors").stat().st_size > FLOAT32_BYTES:
            _store_in_bfloat16(new)
        test = evaluate_source(str(new), data, detail=True).test
        write_metrics(new, read_metrics(new).model_copy(update={"test": test}))
        finish_folder(new)
        manifest = read_manifest(new)
        sha256 = hashlib.sha256(manifest["model.safetensors"]).hexdigest()
        (new / SUMS).unlink()
        write_json(
            new / "check.json", {"sha256": sha256, "logits": check_folder(new, manifest).tolist()}
        )
        if entry.exists():
            entry.rename(Path(temporary) / "old")
        new.rename(entry)
    for code in entry.glob("*.py"):
        code.unlink()
        code.symlink_to(os.path.relpath(CODE / code.name, entry))
    return entry


def _check(run: Path, entry: Path) -> None:
    """Raise ValueError unless the run is finished, and `entry` empty, new or the folder of its model in a catalogue."""
    check_complete(run)
    check_weights(run / "model.safetensors")
    names = {path.name for path in entry.iterdir()} if entry.exists() else set()
    in_catalogue = "check.json" in names or names <= {"README.md", "results"}
    if names and not (in_catalogue and architecture(entry) == architecture(run)):
        raise ValueError(
            f"--out: got {entry}, expected a new folder or that of {architecture(run)} in model_cards"
        )


def _store_in_bfloat16(folder: Path) -> None:
    """Halve the file of weights; both libraries compute in float32 with them."""
    path = folder / "model.safetensors"
    weights = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in load_file(path).items()
    }
    write_file(path, save(weights, {"format": "pt"}))
    # otherwise transformers takes the type of the file
    write_json(folder / "config.json", read_json(folder / "config.json") | {"dtype": "float32"})
