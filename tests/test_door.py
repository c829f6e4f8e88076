"""sa_zoo.train, evaluate, open and publish: from Python what the commands do."""

import ast
from pathlib import Path

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


def left(run):
    return {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*")}


def test_type_checkers_see_the_functions_that_the_package_gives():
    (block,) = (
        part for part in ast.parse(Path(sa_zoo.__file__).read_text()).body if type(part) is ast.If
    )
    seen = {"__package__": "sa_zoo"}
    exec(compile(ast.Module(block.body, []), "types", "exec"), seen)
    assert all(seen.get(name) is getattr(sa_zoo, name) for name in sa_zoo.__all__)


def test_training_returns_the_open_folder_that_it_leaves(run):
    assert run.metrics.train.epochs == 3
    assert left(run) >= {*LEFT.split(), *(f"figures/{name}.png" for name in FIGURES.split())}
    again = sa_zoo.open(run.folder)
    assert sa_zoo.open(again) is again
    assert (again.metrics, again.config, again.source) == (run.metrics, run.config, run.source)
    weights, expected = again.network.state_dict(), run.network.state_dict()
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_a_finished_run_is_left_alone(run, recipe):
    card = run.folder / "README.md"
    rendered = card.read_text()
    card.write_text(f"{rendered}\nA line of mine.")
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    sa_zoo.train(recipe, run.folder, changes=["train.epochs=3"], resume=True)
    for source in (run.folder, run):
        sa_zoo.publish(source, "you/tiny", dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before
    assert CliRunner().invoke(app, ["card", str(run.folder)]).exit_code == 0
    assert card.read_text() == rendered


def test_evaluation_gives_the_reported_result(run):
    reported = run.metrics.test
    for data in ("", "digits"):
        found = sa_zoo.evaluate(str(run.folder), data, ["data.title=ten"], detail=True)
        assert (found.test.confusion_matrix, found.data) == (reported.confusion_matrix, "ten")
        assert found.test.loss == pytest.approx(reported.loss, rel=1e-6)  # weights have moved
    opened = sa_zoo.open(run.folder)
    sa_zoo.harden(opened.network)
    assert sa_zoo.evaluate(opened).test.loss != pytest.approx(reported.loss, rel=1e-6)


PLAIN = "model.args={ embed_dim = [7, 5, 11], depth = [2, 1, 3], num_heads = 2 }"


@pytest.mark.parametrize(("kind", "change"), [("content", "train.seed=1"), ("plain", PLAIN)])
def test_a_run_of_each_kind_of_attention_is_finished(tmp_path, recipe, kind, change):
    changes = [f"model.name=sa_{kind}_cifar", "train.epochs=1", "data.image_size=32", change]
    run = sa_zoo.train(recipe, tmp_path / "run", changes=changes)
    assert left(run) >= {*LEFT.split(), "figures/head_maps.png"}
