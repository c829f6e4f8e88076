"""What is refused before anything leaves the machine."""

import re
import shutil

import pytest
import torch
from damage import flip
from model_folders import make_run
from safetensors.torch import save

import sa_zoo
from sa_zoo.folders.write import write_sums
from sa_zoo.publishing.card import write_card
from sa_zoo.publishing.folder import check_folder, check_loads, read_manifest


def check(run):
    return check_folder(sa_zoo.open(run), read_manifest(run))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "test_vit", "test_vit", num_classes=7)
    write_card(sa_zoo.open(folder))
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "test_vit")


@pytest.mark.parametrize("name", ["config.json", "metrics.json", "model.safetensors"])
def test_an_unfinished_run_is_refused(run, name):
    (run / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(name)):
        sa_zoo.publish(run, "you/test-vit", dry_run=True)


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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("history.jsonl", '{"tracker": "hf_' + "a1B2" * 9 + '"}', "a token"),
        ("explorer.html", "<p>ghp_" + "x" * 36, "a token"),
        ("figures/head_maps.png", "-----BEGIN RSA PRIVATE KEY-----", "a token"),
        ("LICENSE", "licensed to a-token-of-a-hub-of-ones-own", "a token"),
        ("preprocessor_config.json", "PK\x03\x04archive/data.pkl", "a pickle or an archive"),
        ("report.md", "\x80\x04.", "a pickle or an archive"),
    ],
)
def test_a_secret_or_a_pickle_is_refused_and_not_repeated(run, monkeypatch, name, content, said):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub-of-ones-own")
    (run / "explorer.html").touch()
    (run / "figures").mkdir()
    with (run / name).open("ab") as file:
        file.write(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"got .*{said} .*in {name}") as raised:
        sa_zoo.publish(run, "you/test-vit", dry_run=True, space="you/space")
    assert content not in str(raised.value)


def test_different_logits_from_the_two_libraries_are_refused(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    weights = (run / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-4] + bytes([0, 0, 128, 63]))
    with pytest.raises(ValueError, match="got different logits from timm and transformers"):
        check_loads(sa_zoo.open(run).network, other)


@pytest.mark.parametrize("name", ["explorer.html", "modeling_sa.py"])
def test_a_folder_with_a_damaged_file_is_not_published(run, name):
    (run / name).write_text("content")
    write_sums(run, [name])
    sa_zoo.publish(run, "you/test-vit", dry_run=True)
    flip(run / name)
    with pytest.raises(ValueError, match=f"a damaged folder: .*{name} does not match its sha256"):
        sa_zoo.publish(run, "you/test-vit", dry_run=True)
