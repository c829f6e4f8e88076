"""model_cards/: what cannot be made again of every trained model, and the results of all runs."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from catalogue import add_result, add_run, app, render
from model_folders import TEST, make_run
from safetensors.torch import load_file
from tiny_runs import tiny_config
from typer.testing import CliRunner

from sa_zoo.folders.metrics import read_metrics, read_results
from sa_zoo.folders.opened import open_folder
from sa_zoo.interchange.transformers_export import export_for_transformers
from sa_zoo.publishing.card import render_card
from sa_zoo.publishing.folder import check_loads, read_manifest
from sa_zoo.publishing.hub import publish
from sa_zoo.training.config import DataConfig, dump_config
from sa_zoo.verbs.finish import finish_folder

ROOT = Path(__file__).parents[1]
MODEL_CARDS = ROOT / "model_cards"
TRAINED = sorted(path.parent for path in MODEL_CARDS.glob("*/model.safetensors"))
SHOWN = "sa_quadratic_tiny_cifar.long"  # its page is committed, to look at
DIGITS = DataConfig(name="digits")
SMALL = {"embed_dim": 24, "hidden_dim": 29, "num_heads": 3, "depth": 2}


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone") / "model_cards"  # not there yet
    run = make_run(tmp_path_factory.mktemp("runs") / "run", "sa_quadratic_tiny_cifar", **SMALL)
    add_run(run, folder / "sa_quadratic_tiny_cifar", DIGITS)
    (folder / ".DS_Store").write_bytes(b"of a file manager")
    return folder, run


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
    assert metrics.test.n == 1797 == sum(map(sum, metrics.test.confusion_matrix))
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


def test_a_folder_has_neither_code_nor_page_nor_links_and_a_copy_is_complete(catalogue, tmp_path):
    for entry in (catalogue[0] / "sa_quadratic_tiny_cifar", *TRAINED):
        assert not list(entry.glob("*.py")) and not (entry / "sha256.json").exists()
        assert (entry / "explorer.html").exists() == (entry.name == SHOWN)
        assert not any(path.is_symlink() for path in entry.rglob("*"))
    copy = tmp_path / "sa_quadratic_tiny_cifar"
    shutil.copytree(catalogue[0] / "sa_quadratic_tiny_cifar", copy)
    manifest = read_manifest(finish_folder(copy).local_folder)
    code = {f"{name}.py" for name in ("attention", "configuration_sa", "modeling_sa", "network")}
    assert code | {"explorer.html", "README.md"} <= manifest.keys()
    assert b"[explorer.html](explorer.html)" in manifest["README.md"]


def test_a_folder_without_its_code_is_published_with_it(catalogue, capsys):
    publish(open_folder(catalogue[0] / "sa_quadratic_tiny_cifar"), "you/x", dry_run=True)
    printed = capsys.readouterr().out
    for path in (ROOT / "sa_zoo" / "models").glob("[a-c]*.py"):  # attention, configuration_sa
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert re.search(rf"{sha256[:12]} +[\d,]+ {path.name}\n", printed), path


def test_code_that_a_folder_has_is_published_as_it_is(catalogue, tmp_path, capsys):
    copy = tmp_path / "sa_quadratic_tiny_cifar"
    shutil.copytree(catalogue[0] / "sa_quadratic_tiny_cifar", copy)
    (copy / "terms.py").write_text("# of an earlier version\n")
    publish(open_folder(copy), "you/x", dry_run=True)
    assert re.search(r" 24 terms\.py\n", capsys.readouterr().out)


def test_every_registered_model_is_in_the_docs():
    listed = (ROOT / "docs" / "models.md").read_text()
    for name in timm.list_models():
        if timm.models.model_entrypoint(name).__module__.startswith("sa_zoo."):
            assert f"`{name}`" in listed, name


def test_rendering_the_catalogue_again_changes_nothing(catalogue):
    folder, _ = catalogue
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert render(folder) == [folder / "sa_quadratic_tiny_cifar" / "README.md"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_other_seeds_and_recipes_add_results_which_a_new_run_keeps(catalogue, tmp_path):
    run, entry = catalogue[1], tmp_path / "sa_quadratic_tiny_cifar"
    add_result(run, entry, "seed", 1)
    add_result(run, entry, "short", 0)
    add_run(run, entry, DIGITS)
    results = read_results(entry)
    assert [run.test.n for run in results[""]] == [1797, TEST["n"]]
    assert [run.test.n for run in results["short"]] == [TEST["n"]]
    assert re.search(
        r"Trained with 2 seeds, .* top-1 on the test images 0\.\d+, 0\.8711\.",
        render_card(open_folder(entry)),
    )
    assert {"results/seed-1.json", "results/short-0.json"} <= read_manifest(entry).keys()


@pytest.mark.parametrize(
    ("name", "arguments"), [("sa_quadratic_tiny_cifar", SMALL), ("resnet_tiny_cifar", {})]
)
def test_large_weights_are_stored_in_half_the_space_and_both_libraries_compute_alike(
    name, arguments, tmp_path, monkeypatch
):
    monkeypatch.setattr(add_run.__module__ + ".FLOAT32_BYTES", 1000)
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
    assert torch.allclose(check_loads(open_folder(entry).network, entry), logits, atol=1e-5)
    assert logits.bfloat16().float().ne(logits).any()  # computed in float32
    config = (entry / "config.json").read_bytes()
    export_for_transformers(open_folder(entry))
    assert (entry / "config.json").read_bytes() == config


@pytest.mark.parametrize("place", ["", "sa_learned_tiny_cifar", "diary", "../run"])
def test_what_is_not_the_folder_of_the_model_is_never_touched(catalogue, tmp_path, place):
    run = shutil.copytree(catalogue[1], tmp_path / "run")
    model_cards = shutil.copytree(catalogue[0], tmp_path / "model_cards")
    (model_cards / "diary").mkdir()
    (model_cards / "diary" / "README.md").write_text("Dear diary")
    (model_cards / "sa_learned_tiny_cifar" / "results").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for add in (
        lambda entry: add_run(run, entry, DIGITS),
        lambda entry: add_result(run, entry, "short", 0),
    ):
        with pytest.raises(
            ValueError,
            match=r"^--to: got .*, expected a new folder or that of sa_quadratic_tiny_cifar in model_cards",
        ):
            add(model_cards / place)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_adds_seed_0_with_its_weights_and_others_with_their_results(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(add_run.__module__ + ".MODEL_CARDS", tmp_path / "model_cards")
    run = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", **SMALL)
    entry = tmp_path / "model_cards" / "sa_quadratic_tiny_cifar"
    added = []
    for seed, more in ((0, []), (2, []), (0, ["--recipe", "short"])):
        model = {"name": "sa_quadratic_tiny_cifar"}
        (run / "train.toml").write_text(dump_config(tiny_config(model=model, train={"seed": seed})))
        done = CliRunner().invoke(app, ["add", str(run), *more])
        assert done.exit_code == 0, done.exception
        added.append(Path(done.stdout.strip()))
    results = entry / "results"
    assert added == [entry, results / "seed-2.json", results / "short-0.json"]
    (entry / "README.md").unlink()
    done = CliRunner().invoke(app, ["render"])
    assert done.stdout.strip() == str(entry / "README.md") and (entry / "README.md").is_file()


@pytest.mark.parametrize("recipe", ["../../zz", "/zz", "two words", ".hidden"])
def test_a_recipe_is_a_word(catalogue, tmp_path, recipe):
    entry = tmp_path / "model_cards" / "sa_quadratic_tiny_cifar"
    with pytest.raises(ValueError, match=f"^--recipe: got '{recipe}', expected a word"):
        add_result(catalogue[1], entry, recipe, 0)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_does_not_enter(catalogue, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"which lacks config\.json"):
        add_run(tmp_path, tmp_path / "model_cards", DIGITS)
    run = shutil.copytree(catalogue[1], tmp_path / "run")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match="run without a test result, expected the folder of a fin"):
        add_run(run, tmp_path / "model_cards", DIGITS)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_one_command_publishes_all_trained_models(tmp_path):
    names = ["resnet_tiny_cifar", "sa_pyramid_h5_tiny_cifar", "sa_quadratic_tiny_cifar.long"]
    for name in names:
        shutil.copytree(MODEL_CARDS / name, tmp_path / name)
    command = ["publish", "--owner", "somebody", "--model-cards", str(tmp_path), "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert re.findall(r"-> \S+/somebody/(\S+)", done.output) == names
    assert len(re.findall(r" explorer\.html\n", done.output)) == 2  # not of the CNN


def test_a_folder_without_trained_models_is_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="without folders of trained models"):
        render(tmp_path)


def test_the_committed_cards_are_those_of_the_trained_models_and_what_their_folders_give():
    committed = sorted(MODEL_CARDS.glob("*/README.md"))
    assert [path.parent for path in committed] == TRAINED
    for path in committed:
        assert path.read_text() == render_card(open_folder(path.parent)), (
            f"{path.parent.name}: render the catalogue again"
        )


def test_every_folder_has_weights_or_results_of_a_registered_model():
    for entry in filter(Path.is_dir, MODEL_CARDS.iterdir()):
        assert timm.is_model(entry.name.partition(".")[0]) and read_results(entry)


@pytest.mark.parametrize("entry", TRAINED, ids=lambda entry: entry.name)
def test_committed_weights_give_the_stored_logits_in_both_libraries(entry):
    check = json.loads((entry / "check.json").read_text())
    assert hashlib.sha256((entry / "model.safetensors").read_bytes()).hexdigest() == check["sha256"]
    assert torch.allclose(
        check_loads(open_folder(entry).network, entry),
        torch.tensor(check["logits"]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_committed_weights_are_small():
    sizes = [(entry / "model.safetensors").stat().st_size for entry in TRAINED]
    assert max(sizes) <= 60e6 and sum(sizes) <= 120e6
