"""model_cards/: what cannot be made again of every trained model."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch

import sa_zoo
from sa_zoo.publishing.card import render_card
from sa_zoo.publishing.folder import check_loads

ROOT = Path(__file__).parents[1]
TRAINED = sorted(path.parent for path in (ROOT / "model_cards").glob("*/model.safetensors"))
SHOWN = "sa_quadratic_tiny_cifar.long"  # its page is committed, to look at


@pytest.mark.parametrize("entry", TRAINED, ids=lambda entry: entry.name)
def test_a_committed_folder_is_complete_and_loads_everywhere(entry):
    opened = sa_zoo.open(entry)
    assert (entry / "README.md").read_text() == render_card(opened)
    check = json.loads((entry / "check.json").read_text())
    assert hashlib.sha256((entry / "model.safetensors").read_bytes()).hexdigest() == check["sha256"]
    logits = check_loads(opened.network, entry)
    assert torch.allclose(logits, torch.tensor(check["logits"]), rtol=1e-4, atol=1e-4)
    assert not list(entry.glob("*.py")) and not (entry / "sha256.json").exists()
    assert (entry / "explorer.html").exists() == (entry.name == SHOWN)


def test_a_folder_is_published_with_its_code_or_the_packages(tmp_path, capsys):
    copy = shutil.copytree(ROOT / "model_cards" / SHOWN, tmp_path / SHOWN)
    (copy / "terms.py").write_text("# of an earlier version\n")
    sa_zoo.publish(copy, "you/x", dry_run=True)
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
