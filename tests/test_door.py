"""sa_zoo.train, evaluate, open and publish: from Python what the commands do."""

import pytest
import torch
from tiny_runs import tiny_config
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.training.config import dump_config

SMALL = {"patch_size": 4, "embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}
LEFT = "README.md config.json explorer.html history.jsonl metrics.json model.safetensors train.toml"
LEFT += " modeling_sa.py preprocessor_config.json sha256.json"
FIGURES = "learning_curve head_positions head_paths head_maps confusion_matrix"


def sizes(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    model = {"name": "sa_quadratic_tiny_cifar", "args": SMALL}
    path = tmp_path_factory.mktemp("recipes") / "tiny.toml"
    path.write_text(dump_config(tiny_config(model=model, data={"image_size": 16})))
    return path


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return sa_zoo.train(recipe, out, changes=["train.epochs=3"])


def test_training_returns_the_open_folder_that_it_leaves(run, recipe):
    assert run.metrics.train.epochs == 3
    left = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*")}
    assert left >= {*LEFT.split(), *(f"figures/{name}.png" for name in FIGURES.split())}
    again = sa_zoo.open(run.folder)
    assert sa_zoo.open(again) is again
    assert (again.metrics, again.config, again.source) == (run.metrics, run.config, run.source)
    weights = run.network.state_dict()
    assert all(
        torch.equal(value, weights[key]) for key, value in again.network.state_dict().items()
    )


def test_a_finished_run_is_left_alone(run, recipe):
    before = sizes(run.folder)
    sa_zoo.train(recipe, run.folder, changes=["train.epochs=3"], resume=True)
    sa_zoo.publish(run.folder, "you/tiny", dry_run=True)
    sa_zoo.publish(run, "you/tiny", dry_run=True)
    assert CliRunner().invoke(app, ["card", str(run.folder)]).exit_code == 0
    assert sizes(run.folder) == before


def test_evaluation_gives_the_reported_result(run):
    for data in ("", "digits"):
        found = sa_zoo.evaluate(str(run.folder), data, ["data.title=ten"], detail=True)
        assert (found.test, found.data) == (run.metrics.test, "ten")
    opened = sa_zoo.open(run.folder)
    sa_zoo.harden(opened.network)
    assert sa_zoo.evaluate(opened).test.loss != run.metrics.test.loss


PLAIN = "model.args={ embed_dim = [7, 5, 11], depth = [2, 1, 3], num_heads = 2 }"


@pytest.mark.parametrize(
    ("kind", "change", "figures"),
    [
        ("learned", "train.seed=1", ["head_maps"]),
        ("content", "train.seed=1", ["head_maps"]),
        ("plain", PLAIN, ["head_maps", "head_positions", "head_paths"]),
    ],
)
def test_a_run_of_each_kind_of_attention_is_finished(tmp_path, recipe, kind, change, figures):
    changes = [f"model.name=sa_{kind}_cifar", "train.epochs=1", "data.image_size=32", change]
    run = sa_zoo.train(recipe, tmp_path / "run", changes=changes).folder
    left = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert left >= {*LEFT.split(), *(f"figures/{name}.png" for name in figures)}
