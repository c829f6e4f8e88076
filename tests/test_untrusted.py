"""Folders and images of somebody hostile: a clear error, no code executed, nothing written, nothing fetched."""

import contextlib
import json
import re
import shutil
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hostile import FOLDERS, IMAGES, change_config
from model_folders import make_run
from PIL import Image
from tiny_runs import image_folder, parquet_folder
from typer.testing import CliRunner

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.cli import app
from sa_zoo.model_folder import load_model
from sa_zoo.training.config import DataConfig, ModelConfig
from sa_zoo.training.model import InputFormat, create_model
from sa_zoo.training.sources import open_source
from sa_zoo.training.splits import splits_of

SMALL = {"embed_dim": 13, "depth": 2, "num_heads": 3, "hidden_dim": 11, "num_classes": 10}


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("folders") / "run", "sa_quadratic_cifar", **SMALL)


@pytest.fixture
def folder(harmless, tmp_path):
    return Path(shutil.copytree(harmless, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("attack", FOLDERS)
def test_a_hostile_folder_is_refused_with_a_clear_error(folder, monkeypatch, attack):
    change, said = FOLDERS[attack]
    monkeypatch.chdir(folder.parent)
    change(folder)
    before = state_of(folder.parent)
    with pytest.raises((ValueError, OSError)) as raised:
        load_model(str(folder))
    assert re.search(said, str(raised.value)), raised.value
    with pytest.raises((ValueError, OSError)):
        create_model(ModelConfig(name="sa_quadratic_cifar", init=f"local-dir:{folder}"), 10)
    assert state_of(folder.parent) == before


def test_a_harmless_folder_loads_and_starts_a_run_with_other_classes(folder):
    change_config(pretrained_cfg__hf_hub_id="evil/model")(folder)  # where it came from; the weights are the folder's
    assert load_model(str(folder)).num_classes == 10
    model = create_model(ModelConfig(name="sa_quadratic_cifar", init=f"local-dir:{folder}"), 7)
    assert model.num_classes == 7 and torch.equal(
        model.blocks[1].fc2.weight, load_model(str(folder)).blocks[1].fc2.weight
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "FOLDER", "--data", "digits"],
        ["train", "quickstart", "--set", "model.name=sa_quadratic_cifar", "--set", "model.init=local-dir:FOLDER"],
        ["convert", "FOLDER"],
        ["card", "FOLDER"],
        ["publish", "FOLDER", "--repo-id", "you/x", "--dry-run"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("attack", ["weights at a URL", "a pickle as pytorch_model.bin", "NaN weights", "deep nesting"])
def test_every_command_that_takes_a_folder_refuses_it(folder, tmp_path, monkeypatch, arguments, attack):
    monkeypatch.chdir(tmp_path)
    FOLDERS[attack][0](folder)
    before = state_of(folder)
    arguments = [word.replace("FOLDER", str(folder)) for word in arguments]
    if arguments[0] in ("train", "convert"):
        arguments += ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.exception
    assert state_of(folder) == before and not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("attack", IMAGES)  # datasets leaves the files of animations open
def test_a_strange_image_is_read_or_named(tmp_path, monkeypatch, attack):
    name, content, said = IMAGES[attack]
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "data", {"train/good": 2, "train/zebra": 2})
    (tmp_path / "data" / "train" / "bad").mkdir()  # sorted first: row 0
    (tmp_path / "data" / "train" / "bad" / name).write_bytes(content)
    before = state_of(tmp_path / "data")
    form = InputFormat((3, 8, 8), (0.5,) * 3, (0.2,) * 3, "bicubic", 1.0)
    # kept on the device, and streamed by workers
    for bound in (2**31, 0) if attack in ("an empty file", "CMYK", "an animation") else (2**31,):
        monkeypatch.setattr("sa_zoo.training.splits.KEPT_BYTES", bound)
        source = open_source(DataConfig(name=str(tmp_path / "data")))
        if said:
            with pytest.raises(ValueError, match=said) as raised:
                for _ in splits_of(source, 0, form, torch.device("cpu"), ["train"])["train"].loader(5):
                    pass
            assert "\n" not in str(raised.value)
            raised.value.__traceback__ = None  # it keeps the loader, whose threads end well only before it is collected
            del raised
        else:
            for images, _, _ in splits_of(source, 0, form, torch.device("cpu"), ["train"])["train"].loader(5):
                assert images.shape[1:] == (3, 8, 8)
    assert state_of(tmp_path / "data") == before and not (tmp_path / "executed").exists()


def test_one_bit_images_are_black_and_white(tmp_path):
    folder = image_folder(tmp_path / "data", {"train/a": 1, "train/b": 1})
    pixels = np.eye(8, dtype=bool)
    Image.fromarray(pixels).save(folder / "train" / "a" / "0.png")
    form = InputFormat((1, 8, 8), (0.5,), (0.2,), "bicubic", 1.0)
    source = open_source(DataConfig(name=str(folder)))
    (folder / "train" / "b" / "0.png").write_bytes((folder / "train" / "a" / "0.png").read_bytes())
    images = splits_of(source, 0, form, torch.device("cpu"), ["train"])["train"].images
    assert sorted(images[0].unique().tolist()) == [0, 255]


def test_a_label_out_of_range_is_reported(tmp_path):
    folder = parquet_folder(tmp_path / "data", {"train": [Image.new("RGB", (8, 8))] * 5}, classes=3)
    path = next(folder.glob("*.parquet"))
    table = pyarrow.parquet.read_table(path)
    wrong = pyarrow.array([0, 1, 2, 7, 1], table["label"].type)
    pyarrow.parquet.write_table(table.set_column(1, table.schema.field("label"), wrong), path)
    with pytest.raises(ValueError, match="got class 7 in the train split, expected less than 3"):
        open_source(DataConfig(name=str(folder)))


@pytest.mark.parametrize("path", ["/etc/hostname.png", "http://127.0.0.1:9/x.png", "../secret.png"])
def test_images_outside_of_the_data_folder_are_refused(tmp_path, path):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = parquet_folder(tmp_path / "data", {"train": [Image.new("RGB", (8, 8))] * 3})
    parquet = next(folder.glob("*.parquet"))
    table = pyarrow.parquet.read_table(parquet)
    images = pyarrow.array([{"bytes": None, "path": path}] * 3, table["img"].type)
    pyarrow.parquet.write_table(table.set_column(0, table.schema.field("img"), images), parquet)
    with pytest.raises(ValueError, match="expected images inside"):
        open_source(DataConfig(name=str(folder)))


def test_data_files_outside_of_the_data_folder_are_refused(tmp_path):
    image_folder(tmp_path / "secret", {"a": 2, "b": 2})
    folder = image_folder(tmp_path / "data", {"a": 2, "b": 2})
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../secret/*/*.png\n---\n")
    with pytest.raises((ValueError, FileNotFoundError)):
        open_source(DataConfig(name=str(folder)))


def test_names_that_leave_the_data_folder_are_refused(tmp_path):
    folder = image_folder(tmp_path / "data", {"train": 2})
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    lines = [json.dumps({"file_name": name, "label": 0}) for name in ("0.png", "../../secret.png")]
    (folder / "train" / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"relative path|inside"):
        open_source(DataConfig(name=str(folder)))


def test_an_archive_of_images_writes_nothing_outside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    image_folder(tmp_path / "images", {"a": 2, "b": 2})
    with zipfile.ZipFile(tmp_path / "data" / "train.zip", "w") as archive:
        for path in (tmp_path / "images").rglob("*.png"):
            archive.write(path, path.relative_to(tmp_path / "images"))
        archive.write(path, "../../escaped.png")
        archive.write(path, str(tmp_path / "absolute.png"))
    before = state_of(tmp_path / "data")
    with contextlib.suppress(ValueError):  # images of different depth have no labels
        open_source(DataConfig(name=str(tmp_path / "data")))
    assert state_of(tmp_path / "data") == before
    assert not (tmp_path / "absolute.png").exists() and not (tmp_path / "escaped.png").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.toml", "model = 7\n"),
        ("train.toml", "a = " + "[" * 100_000),
        ("metrics.json", '{"test": {"top1": "high"}}'),
        ("metrics.json", "[" * 100_000),
        ("sha256.json", "[" * 100_000),
        ("history.jsonl", '{"epoch": "one"}\n'),
        ("history.jsonl", "[" * 100_000),
    ],
)
def test_other_files_of_a_hostile_folder_are_refused_too(folder, name, content):
    (folder / name).write_text(content)
    result = CliRunner().invoke(app, ["card", str(folder)])
    assert result.exit_code == 1 and "error: " in result.stderr, result.exception
    assert not (folder / "README.md").exists()


def test_links_out_of_a_model_folder_are_not_published(folder, tmp_path):
    (tmp_path / "secret").write_text("a diary")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    result = CliRunner().invoke(app, ["publish", str(folder), "--repo-id", "you/x", "--dry-run"])
    assert result.exit_code == 1 and re.search("LICENSE.*link", result.stderr), result.output
