"""The catalogue: one folder per registered model, with its card and the files that the card is rendered from."""

from pathlib import Path

import timm

from sa_zoo.publishing.card import write_card


def registered_models() -> list[str]:
    """timm names of the models of this package."""
    names = timm.list_models()
    return [name for name in names if timm.models.model_entrypoint(name).__module__.startswith("sa_zoo.")]


def write_catalogue(model_cards: Path) -> None:
    """Render the card of every folder and registered model; that of one without a trained run says so."""
    for name in {*registered_models(), *(path.name for path in model_cards.iterdir())}:
        (model_cards / name).mkdir(parents=True, exist_ok=True)
        write_card(model_cards / name)
