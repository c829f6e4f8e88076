"""model_cards/: a card for every registered model, and everything that is published for the trained ones."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import catalogue as commands
import pytest
import torch
from catalogue import add_result, add_run
from model_folders import TEST, make_run
from safetensors.torch import load_file
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.folders.metrics import read_metrics, read_results
from sa_zoo.interchange.transformers_export import export_for_transformers
from sa_zoo.publishing.card import registered_models, render_card, write_catalogue
from sa_zoo.publishing.folder import check_loads, read_manifest
from sa_zoo.training.config import DataConfig

ROOT = Path(__file__).parents[1]
MODEL_CARDS = ROOT / "model_cards"
TRAINED = sorted(path.parent for path in MODEL_CARDS.glob("*/model.safetensors"))
DIGITS = DataConfig(name="digits")
SMALL = {"embed_dim": 24, "hidden_dim": 29, "num_heads": 3, "depth": 2}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone") / "model_cards"  # not there yet
    run = make_run(tmp_path_factory.mktemp("runs") / "run", "sa_quadratic_tiny_cifar", **SMALL)
    add_run(run, folder / "sa_quadratic_tiny_cifar", DIGITS)
    (folder / ".DS_Store").write_bytes(b"of a file manager")
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


def test_a_trained_model_has_its_weights_and_what_was_measured_with_them(catalogue):
    folder, run = catalogue
    entry = folder / "sa_quadratic_tiny_cifar"
    weights = (run / "model.safetensors").read_bytes()
    assert (entry / "model.safetensors").read_bytes() == weights
    assert (
        json.loads((entry / "check.json").read_text())["sha256"]
        == hashlib.sha256(weights).hexdigest()
    )
    metrics = read_metrics(entry)
    assert metrics.test.n == 359 and sum(map(sum, metrics.test.confusion_matrix)) == 359
    assert metrics.train == read_metrics(run).train and read_metrics(run).test.n == TEST["n"]
    assert {path.name for path in (entry / "figures").iterdir()} == {
        f"{name}.png"
        for name in (
            "confusion_matrix",
            "head_positions",
            "head_maps",
            "head_depth",
            "learning_curve",
            "reliability",
        )
    }


def test_the_code_in_a_folder_is_that_of_the_package(catalogue):
    for entry in (
        catalogue[0] / "sa_quadratic_tiny_cifar",
        MODEL_CARDS / "sa_quadratic_tiny_cifar",
    ):
        links = {path.name: path for path in entry.glob("*.py")}
        assert {"modeling_sa.py", "configuration_sa.py", "terms.py"} <= links.keys()
        for name, path in links.items():
            assert (
                path.is_symlink()
                and path.read_bytes() == (ROOT / "sa_zoo" / "models" / name).read_bytes()
            )


def test_rendering_the_catalogue_again_changes_nothing(catalogue):
    folder, _ = catalogue
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_catalogue(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_other_seeds_and_recipes_add_results_which_a_new_run_keeps(catalogue, tmp_path):
    run, entry = catalogue[1], tmp_path / "sa_quadratic_tiny_cifar"
    add_result(run, entry, "seed", 1)
    add_result(run, entry, "short", 0)
    add_run(run, entry, DIGITS)
    results = read_results(entry)
    assert [run.test.n for run in results[""]] == [359, TEST["n"]]
    assert [run.test.n for run in results["short"]] == [TEST["n"]]
    assert re.search(
        r"Trained with 2 seeds, .* top-1 on the test images 0\.\d+, 0\.8711\.", render_card(entry)
    )
    assert {"results/seed-1.json", "results/short-0.json"} <= read_manifest(entry).keys()


@pytest.mark.parametrize(
    ("name", "arguments"), [("sa_quadratic_tiny_cifar", SMALL), ("resnet_tiny_cifar", {})]
)
def test_large_weights_are_stored_in_half_the_space_and_both_libraries_compute_alike(
    name, arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(commands, "FLOAT32_BYTES", 1000)
    run = make_run(tmp_path / "run", name, **arguments)
    entry = add_run(run, tmp_path / name, DIGITS)
    stored, before = load_file(entry / "model.safetensors"), load_file(run / "model.safetensors")
    assert stored.keys() == before.keys()
    assert all(
        torch.equal(stored[key], value.bfloat16())
        for key, value in before.items()
        if value.is_floating_point()
    )
    logits = torch.tensor(json.loads((entry / "check.json").read_text())["logits"])
    assert torch.allclose(check_loads(f"local-dir:{entry}", entry), logits, atol=1e-5)
    assert logits.bfloat16().float().ne(logits).any()  # computed in float32
    config = (entry / "config.json").read_bytes()
    export_for_transformers(entry)
    assert (entry / "config.json").read_bytes() == config


@pytest.mark.parametrize("place", ["", "sa_learned_tiny_cifar", "diary", "../run"])
def test_what_is_not_the_folder_of_the_model_is_never_touched(catalogue, tmp_path, place):
    run = shutil.copytree(catalogue[1], tmp_path / "run")
    model_cards = shutil.copytree(catalogue[0], tmp_path / "model_cards")
    (model_cards / "diary").mkdir()
    (model_cards / "diary" / "README.md").write_text("Dear diary")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for add in (
        lambda entry: add_run(run, entry, DIGITS),
        lambda entry: add_result(run, entry, "short", 0),
    ):
        with pytest.raises(
            ValueError,
            match=r"expected (a new folder or that of sa_quadratic|a name that timm lists)",
        ):
            add(model_cards / place)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("recipe", ["../../zz", "/zz", "two words", ".hidden"])
def test_a_recipe_is_a_word(catalogue, tmp_path, recipe):
    entry = tmp_path / "model_cards" / "sa_quadratic_tiny_cifar"
    with pytest.raises(ValueError, match=f"^--recipe: got '{recipe}', expected a word"):
        add_result(catalogue[1], entry, recipe, 0)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_does_not_enter(tmp_path):
    with pytest.raises(
        ValueError, match=r"without config\.json, metrics\.json, model\.safetensors"
    ):
        add_run(tmp_path, tmp_path / "model_cards", DIGITS)


def test_one_command_publishes_all_trained_models():
    done = CliRunner().invoke(
        app, ["publish", str(MODEL_CARDS), "--owner", "somebody", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    assert re.findall(r"-> \S+/(somebody/\S+)", done.output) == [
        f"somebody/{entry.name}" for entry in TRAINED
    ]


@pytest.mark.parametrize("arguments", [[], ["--owner", "somebody", "--repo-id", "somebody/model"]])
def test_one_model_or_all_of_an_owner_are_published(arguments, tmp_path):
    done = CliRunner().invoke(app, ["publish", str(tmp_path), *arguments])
    assert done.exit_code == 1 and "expected one of the two" in done.output


def test_the_committed_cards_are_what_their_folders_give():
    committed = sorted(MODEL_CARDS.glob("*/README.md"))
    assert sorted({path.parent.name.partition(".")[0] for path in committed}) == registered_models()
    for path in committed:
        assert path.read_text() == render_card(path.parent), (
            f"{path.parent.name}: render the catalogue again"
        )


@pytest.mark.parametrize("entry", TRAINED, ids=lambda entry: entry.name)
def test_committed_weights_give_the_stored_logits_in_both_libraries(entry):
    check = json.loads((entry / "check.json").read_text())
    assert hashlib.sha256((entry / "model.safetensors").read_bytes()).hexdigest() == check["sha256"]
    assert torch.allclose(
        check_loads(f"local-dir:{entry}", entry),
        torch.tensor(check["logits"]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_committed_weights_are_small():
    sizes = [(entry / "model.safetensors").stat().st_size for entry in TRAINED]
    assert max(sizes) <= 60e6 and sum(sizes) <= 120e6
