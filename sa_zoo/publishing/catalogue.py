"""The catalogue: one folder per registered model, with its card and the files that the card is made of."""

import shutil
from pathlib import Path

import timm

from sa_zoo.model_folder import write_file
from sa_zoo.publishing.card import architecture, write_card
from sa_zoo.publishing.folder import check_complete, read_manifest


def registered_models() -> list[str]:
    """timm names of the models of this package."""
    names = timm.list_models()
    return [name for name in names if timm.models.model_entrypoint(name).__module__.startswith("sa_zoo.")]


def write_catalogue(model_cards: Path) -> list[Path]:
    """Render the card of every registered model; one without a trained run says that it has none."""
    for name in registered_models():
        (model_cards / name).mkdir(parents=True, exist_ok=True)
    return [write_card(model_cards / name) for name in registered_models()]


def add_run(run: Path, model_cards: Path) -> Path:
    """Put a finished run into the catalogue without its weights; SHA256SUMS keeps their sum.

    Raises ValueError if the folder does not hold a finished run.
    """
    check_complete(run)
    manifest = read_manifest(run)
    weights = manifest.pop("model.safetensors")
    entry = model_cards / architecture(run)
    shutil.rmtree(entry, ignore_errors=True)
    for name in (name for name in manifest if not name.endswith(".py")):
        (entry / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, entry / name)
    write_file(entry / "SHA256SUMS", f"{weights.sha256}  model.safetensors\n")
    return write_card(entry)
