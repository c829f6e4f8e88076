"""model_cards/: what cannot be made again of every trained model, and the results of all runs."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from model_folders import TEST, make_run
from safetensors.torch import load_file
from tiny_runs import tiny_config

from sa_zoo.folders.metrics import read_metrics, read_results
from sa_zoo.folders.opened import open_folder
from sa_zoo.publishing.card import render_card
from sa_zoo.publishing.folder import check_loads, read_manifest
from sa_zoo.publishing.hub import publish
from sa_zoo.training.config import dump_config
from sa_zoo.verbs.finish import finish_folder

ROOT = Path(__file__).parents[1]
MODEL_CARDS = ROOT / "model_cards"
TRAINED = sorted(path.parent for path in MODEL_CARDS.glob("*/model.safetensors"))
SHOWN = "sa_quadratic_tiny_cifar.long"  # its page is committed, to look at
NAME = "sa_quadratic_tiny_cifar"
SMALL = {"embed_dim": 24, "hidden_dim": 29, "num_heads": 3, "depth": 2}
WIDE = {"embed_dim": 601, "hidden_dim": 29, "num_heads": 3, "depth": 2}  # more than 8 MB
ROWS = f"""
[short]

[[run]]
name = "{NAME}"
weights = "clone"

[[run]]
name = "{NAME}.short"

[[run]]
name = "{NAME}.wide"
weights = "clone"
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with a table of its own and no folder of a model; runs scripts/catalogue.py in it."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    (clone / "results").mkdir()
    (clone / "results" / "runs.toml").write_text(ROWS)

    def catalogue(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "scripts/catalogue.py", *arguments],
            cwd=clone,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    sizes = {
        f"{NAME}-0": SMALL,
        f"{NAME}-2": SMALL,
        f"{NAME}.short-0": SMALL,
        f"{NAME}.wide-0": WIDE,
    }
    for name, arguments in sizes.items():
        run = make_run(clone / name, NAME, **arguments)
        train = {"seed": int(name[-1])}
        (run / "train.toml").write_text(dump_config(tiny_config(model={"name": NAME}, train=train)))
        done = catalogue("add", name, "--data", "digits")
        assert done.returncode == 0, done.stderr
    return clone, catalogue


def test_runs_are_filed_as_their_rows_say(clone):
    folder = clone[0] / "model_cards"
    assert sorted(path.name for path in folder.iterdir()) == [NAME, f"{NAME}.wide"]
    entry = folder / NAME
    weights = (entry / "model.safetensors").read_bytes()
    assert weights == (clone[0] / f"{NAME}-0" / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(weights).hexdigest()
    assert json.loads((entry / "check.json").read_text())["sha256"] == sha256
    test = read_metrics(entry).test
    assert test.n == 354 == sum(map(sum, test.confusion_matrix))  # measured again
    results = read_results(entry)
    assert [run.test.n for run in results[""]] == [354, TEST["n"]]
    assert [run.test.n for run in results["short"]] == [TEST["n"]]
    card = (entry / "README.md").read_text()
    assert card == render_card(open_folder(entry)) and "Trained with 2 seeds, " in card


def test_large_weights_are_stored_in_half_the_space_and_computed_in_float32(clone):
    entry = clone[0] / "model_cards" / f"{NAME}.wide"
    before = load_file(clone[0] / f"{NAME}.wide-0" / "model.safetensors")
    for key, value in load_file(entry / "model.safetensors").items():
        assert torch.equal(value, before[key].bfloat16() if value.is_floating_point() else value)
    logits = torch.tensor(json.loads((entry / "check.json").read_text())["logits"])
    assert torch.allclose(check_loads(open_folder(entry).network, entry), logits, atol=1e-5)
    assert logits.bfloat16().float().ne(logits).any()


@pytest.mark.parametrize("name", ["unknown-0", f"{NAME}-x", f"{NAME}.short-0"])
def test_what_has_no_row_or_result_is_refused(clone, name):
    folder, catalogue = clone
    before = {path: path.stat().st_mtime_ns for path in (folder / "model_cards").rglob("*")}
    run = folder / "elsewhere" / name
    shutil.copytree(folder / f"{NAME}-0", run)
    (run / "metrics.json").unlink()
    done = catalogue("add", str(run))
    assert done.returncode == 1 and re.search(r"ValueError: got .*, expected", done.stderr)
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "model_cards").rglob("*")}


def test_one_command_publishes_all_trained_models(clone):
    done = clone[1]("publish", "--owner", "somebody", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"-> \S+/somebody/(\S+)", done.stdout) == [NAME, f"{NAME}.wide"]
    assert len(re.findall(r" explorer\.html\n", done.stdout)) == 2


def test_a_folder_has_neither_code_nor_page_nor_links_and_a_copy_is_complete(clone, tmp_path):
    folder = clone[0] / "model_cards" / NAME
    for entry in (folder, *TRAINED):
        assert not list(entry.glob("*.py")) and not (entry / "sha256.json").exists()
        assert (entry / "explorer.html").exists() == (entry.name == SHOWN)
        assert not any(path.is_symlink() for path in entry.rglob("*"))
    copy = shutil.copytree(folder, tmp_path / NAME)
    manifest = read_manifest(finish_folder(copy).local_folder)
    code = {f"{name}.py" for name in ("attention", "configuration_sa", "modeling_sa", "network")}
    assert code | {"explorer.html", "README.md"} <= manifest.keys()
    assert b"[explorer.html](explorer.html)" in manifest["README.md"]


def test_a_folder_is_published_with_its_code_or_that_of_the_package(clone, tmp_path, capsys):
    copy = shutil.copytree(clone[0] / "model_cards" / NAME, tmp_path / NAME)
    (copy / "terms.py").write_text("# of an earlier version\n")
    publish(open_folder(copy), "you/x", dry_run=True)
    printed = capsys.readouterr().out
    assert re.search(r" 24 terms\.py\n", printed)
    for path in (ROOT / "sa_zoo" / "models").glob("[a-c]*.py"):  # attention, configuration_sa
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert re.search(rf"{sha256[:12]} +[\d,]+ {path.name}\n", printed), path


def test_every_registered_model_is_in_the_docs():
    listed = (ROOT / "docs" / "models.md").read_text()
    for name in timm.list_models():
        if timm.models.model_entrypoint(name).__module__.startswith("sa_zoo."):
            assert f"`{name}`" in listed, name


def test_the_committed_cards_are_those_that_their_folders_give():
    for folder in TRAINED:
        assert (folder / "README.md").read_text() == render_card(open_folder(folder)), folder.name


@pytest.mark.parametrize("entry", TRAINED, ids=lambda entry: entry.name)
def test_committed_weights_give_the_stored_logits_in_both_libraries(entry):
    check = json.loads((entry / "check.json").read_text())
    assert hashlib.sha256((entry / "model.safetensors").read_bytes()).hexdigest() == check["sha256"]
    logits = check_loads(open_folder(entry).network, entry)
    assert torch.allclose(logits, torch.tensor(check["logits"]), rtol=1e-4, atol=1e-4)


def test_committed_weights_are_small():
    sizes = [(entry / "model.safetensors").stat().st_size for entry in TRAINED]
    assert max(sizes) <= 60e6 and sum(sizes) <= 120e6
