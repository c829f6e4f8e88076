"""What is refused before anything leaves the machine, and what a moved folder publishes."""

import json
import shutil

import pytest
import torch
from damage import flip
from model_folders import make_run

import sa_zoo
from sa_zoo.folders.write import write_sums
from sa_zoo.publishing.card import write_card
from sa_zoo.publishing.hub import manifest_of
from sa_zoo.publishing.transformers_export import remote_code, transformers_files


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "test_vit", "test_vit", num_classes=7)
    write_card(sa_zoo.open(folder))
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "renamed")


def refused(run, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        sa_zoo.publish(run, "you/test-vit", dry_run=True)


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "model.safetensors"])
def test_an_unfinished_run_is_refused(run, name):
    (run / name).unlink()
    refused(run, name)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("history.jsonl", "hf_" + "a1B2" * 9, "a token"),
        ("LICENSE", "-----BEGIN PGP PRIVATE KEY BLOCK-----", "a token"),
        ("LICENSE", "licensed to a-token-of-a-hub-of-ones-own", "a token"),
        ("heads.safetensors", "\x80\x04.", "SafetensorError"),
    ],
)
def test_a_secret_or_a_pickle_is_refused(run, monkeypatch, name, content, reason):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub-of-ones-own")
    (run / name).write_bytes(content.encode("latin-1"))
    refused(run, reason)


def test_a_changed_network_is_refused_with_that_reason(run):
    opened = sa_zoo.open(run)
    sa_zoo.publish(opened, "you/test-vit", dry_run=True)
    with torch.no_grad():
        opened.network.head.bias += 1
    refused(opened, "the network was changed after it was opened")


def test_a_folder_with_a_damaged_file_is_refused(run):
    (run / "explorer.html").write_text("content")
    write_sums(run, ["explorer.html"])
    sa_zoo.publish(run, "you/test-vit", dry_run=True)
    flip(run / "explorer.html")
    refused(run, r"a damaged folder: .*explorer\.html does not match its sha256")


@pytest.mark.parametrize("reference", ["theirs.Model", "you/x--modeling_sa.SAModel"])
def test_code_of_others_is_refused(run, reference):
    config = json.loads((run / "config.json").read_text()) | {"auto_map": {"AutoModel": reference}}
    (run / "config.json").write_text(json.dumps(config))
    refused(run, "auto_map")


def test_the_published_code_is_that_of_the_package(tmp_path):
    opened = sa_zoo.open(make_run(tmp_path / "run", "sa_quadratic_tiny_cifar"))
    opened = opened.with_files(transformers_files(opened))
    (opened.folder / "terms.py").write_text("# of an earlier version")
    (opened.folder / "mine.py").write_text("# another program")
    sent = manifest_of(opened, "you/x")
    code = {name: content for name, content in sent.items() if name.endswith(".py")}
    assert code == remote_code() and "terms.py" in code
