"""A card for every registered model, trained or not."""

import hashlib
from pathlib import Path

import pytest
from model_folders import make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.publishing.card import add_run, registered_models, render_card, write_catalogue

MODEL_CARDS = Path(__file__).parents[1] / "model_cards"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model_cards")
    run = make_run(tmp_path_factory.mktemp("runs") / "run", "sa_quadratic_tiny_cifar")
    add_run(run, folder)
    write_catalogue(folder)
    return folder, run


def test_every_registered_model_has_a_card(catalogue):
    folder, _ = catalogue
    assert sorted(path.parent.name for path in folder.glob("*/README.md")) == registered_models()


def test_a_model_without_weights_says_so_and_claims_no_accuracy(catalogue):
    folder, _ = catalogue
    card = (folder / "sa_learned_tiny_cifar" / "README.md").read_text()
    assert "No trained weights of this model are published yet" in card
    assert "## Results" not in card and "model-index" not in card and "## Use" not in card


def test_a_trained_model_keeps_its_card_and_the_sum_of_its_weights_without_them(catalogue):
    folder, run = catalogue
    entry = folder / "sa_quadratic_tiny_cifar"
    assert (entry / "README.md").read_text() == render_card(run)
    assert not (entry / "model.safetensors").exists()
    assert hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() in (entry / "SHA256SUMS").read_text()


def test_rendering_the_catalogue_again_changes_nothing(catalogue):
    folder, _ = catalogue
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_catalogue(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_unfinished_run_does_not_enter(tmp_path):
    with pytest.raises(ValueError, match=r"without config\.json, metrics\.json, model\.safetensors"):
        add_run(tmp_path, tmp_path / "model_cards")


def test_the_committed_cards_are_what_their_folders_give():
    committed = sorted(MODEL_CARDS.glob("*/README.md"))
    assert [path.parent.name for path in committed] == registered_models()
    for path in committed:
        assert path.read_text() == render_card(path.parent), f"{path.parent.name}: render the catalogue again"
