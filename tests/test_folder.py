"""What is refused before anything leaves the machine."""

import json
import re
import shutil

import pytest
import torch
from catalogue import add_result, add_run
from damage import flip
from model_folders import make_run
from safetensors.torch import save

from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import write_sums
from sa_zoo.publishing.card import published_card, write_card
from sa_zoo.publishing.folder import check_folder, check_loads, read_manifest
from sa_zoo.publishing.hub import publish
from sa_zoo.training.config import DataConfig


def check(run):
    return check_folder(open_folder(run), read_manifest(run))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "test_vit", "test_vit", num_classes=7)
    write_card(open_folder(folder))
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "test_vit")


def test_a_finished_run_passes_and_both_libraries_agree_on_its_logits(run):
    check(run)
    assert read_manifest(run)["README.md"] == (run / "README.md").read_bytes()


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "model.safetensors"])
def test_an_unfinished_run_is_refused(run, name):
    (run / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(name)):
        publish(open_folder(run), "you/test-vit", dry_run=True)


def test_a_header_whose_size_reads_like_a_pickle_is_none(run):
    # the first two bytes of a header of 640 bytes are those of a pickle of protocol 2
    sizes = {len(save({"Delta": torch.ones(3)}, {"x": "y" * n})): n for n in range(700)}
    content = save({"Delta": torch.ones(3)}, {"x": "y" * sizes[8 + 640 + 12]})
    assert content.startswith(b"\x80\x02")
    (run / "heads.safetensors").write_bytes(content)
    check(run)
    for disguised in (content[:-1], content[:8] + b"{}q\x00."):
        (run / "heads.safetensors").write_bytes(disguised)
        with pytest.raises(ValueError, match=r"got a pickle or an archive in heads\.safetensors"):
            check(run)


@pytest.mark.parametrize("content", [b"\x80\x04\x95", b"PK\x03\x04archive/data.pkl"])
def test_a_pickle_under_another_name_is_refused(run, content):
    (run / "preprocessor_config.json").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"got a pickle or an archive in .*preprocessor_config\.json"
    ):
        check(run)


@pytest.mark.parametrize(
    "secret", ["hf_" + "a1B2" * 9, "ghp_" + "x" * 36, "-----BEGIN RSA PRIVATE KEY-----"]
)
def test_a_secret_in_any_file_is_refused_and_not_repeated(run, secret):
    with (run / "train.toml").open("a") as file:
        file.write(f'tracker = "{secret}"\n')
    with pytest.raises(ValueError, match=r"got what looks like a token in .*train\.toml") as raised:
        check(run)
    assert secret not in str(raised.value)


def test_the_token_in_use_is_found_whatever_it_looks_like(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub-of-ones-own")
    (run / "LICENSE").write_text("licensed to a-token-of-a-hub-of-ones-own")
    with pytest.raises(ValueError, match=r"got what looks like a token in .*LICENSE"):
        check(run)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architecture", "hf-hub:somebody/elses", "expected a name that timm lists"),
        ("architecture", "local-dir:..", "expected a name that timm lists"),
        ("model_args", {"num_classes": 7}, "got num_classes in config.json's model_args"),
    ],
)
def test_a_config_that_points_elsewhere_or_breaks_transformers_is_refused(run, key, value, words):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ValueError, match=words):
        published_card(open_folder(run), "you/test-vit")
        check(run)


def test_different_logits_from_the_two_libraries_are_refused(run, tmp_path):
    torch.manual_seed(1)
    other = make_run(tmp_path / "other", "test_vit", num_classes=7)
    weights = (run / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-4] + bytes([0, 0, 128, 63]))
    with pytest.raises(ValueError, match="got different logits from timm and transformers"):
        check_loads(open_folder(run).network, other)


def test_only_listed_files_are_published(run):
    (run / "figures").mkdir()
    (run / "figures" / "learning_curve.png").write_bytes(b"png")
    (run / "heads.safetensors").write_bytes(b"heads")
    (run / "explorer.html").write_text("<!doctype html>")
    (run / "optimizer.pt").write_bytes(b"pickle")
    manifest = read_manifest(run)
    assert {"figures/learning_curve.png", "heads.safetensors", "explorer.html"} <= manifest.keys()
    assert "optimizer.pt" not in manifest


@pytest.mark.parametrize(
    "name", ["heads.safetensors", "explorer.html", "history.jsonl", "modeling_sa.py"]
)
def test_a_damaged_file_is_neither_published_nor_added_to_the_catalogue(run, tmp_path, name):
    (run / name).write_text("content")
    write_sums(run, [name])
    publish(open_folder(run), "you/test-vit", dry_run=True)
    flip(run / name)
    for use in (
        lambda: publish(open_folder(run), "you/test-vit", dry_run=True),
        lambda: add_run(run, tmp_path / "entry", DataConfig(name="digits")),
        lambda: add_result(run, tmp_path / "entry", "seed", 1),
    ):
        with pytest.raises(
            ValueError, match=rf"got a damaged folder: .*{name} does not match its sha256"
        ):
            use()
    assert not (tmp_path / "entry").exists()
