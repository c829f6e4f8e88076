"""Folders and images of somebody hostile: a clear error, no code executed, nothing written, nothing fetched."""

import io
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import pyarrow.parquet
import pytest
import timm
from hostile import FOLDERS, IMAGES, change_config
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import make_run
from PIL import Image
from tiny_runs import image_folder, parquet_folder
from typer.testing import CliRunner

import sa_zoo
from sa_zoo.cli import app
from sa_zoo.data.config import DataConfig
from sa_zoo.data.image_file import open_image
from sa_zoo.data.open_images import open_images
from sa_zoo.folders.check import checked
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.config import ModelConfig
from sa_zoo.training.model import create_model

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
        sa_zoo.open(folder)
    assert re.search(said, str(raised.value)), raised.value
    with pytest.raises((ValueError, OSError)):
        create_model(ModelConfig(name="sa_quadratic_cifar", init=f"local-dir:{folder}"), 10)
    assert state_of(folder.parent) == before


KEYS = ["architecture", "num_classes", "global_pool", "label_names", "model_args", "pretrained_cfg"]
KEYS += ["model_args.depth", "model_args.img_size", "pretrained_cfg.input_size"]
SCALARS = st.one_of(st.integers(-3, 70), st.integers(), st.floats(), st.none(), st.text(max_size=9))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=6)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_random_values_in_a_configuration_are_loaded_or_refused(harmless, changes):
    with TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(harmless, Path(temporary) / "run"))
        config = json.loads((folder / "config.json").read_text())
        for path, value in changes.items():
            table, _, key = path.rpartition(".")
            place = config[table] if table else config
            if isinstance(place, dict):
                place[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        before = state_of(folder)
        with suppress(ValueError, OSError):
            sa_zoo.open(folder)
        assert state_of(folder) == before


def test_a_network_of_many_small_tensors_is_within_the_bounds(tmp_path):
    """More than 8 times its elements, as each tensor counts as at least 8,192, in three networks."""
    write_timm_files(tmp_path, timm.create_model("ghostnetv3_050", num_classes=10))
    with checked(f"local-dir:{tmp_path}"):
        for _ in range(3):
            timm.create_model(f"local-dir:{tmp_path}")


@pytest.mark.parametrize(
    "command",
    [
        "evaluate FOLDER --data digits",
        "train quickstart --set model.name=sa_quadratic_cifar --set model.init=FOLDER --out out",
        "convert FOLDER --out out",
        "card FOLDER",
        "publish FOLDER --repo-id you/x --dry-run",
    ],
)
def test_every_command_that_takes_a_folder_refuses_it(folder, monkeypatch, command):
    monkeypatch.chdir(folder.parent)
    change_config(pretrained_cfg__url="http://127.0.0.1:9/x.bin")(folder)
    before = state_of(folder)
    result = CliRunner().invoke(app, command.replace("FOLDER", str(folder)).split())
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.exception
    assert state_of(folder) == before and not Path("out").exists()


@pytest.mark.parametrize("attack", IMAGES)
def test_a_strange_image_is_read_or_refused(attack):
    content, said = IMAGES[attack]
    if said:
        with pytest.raises(ValueError, match=said) as raised:
            open_image(io.BytesIO(content))
        assert "\n" not in str(raised.value)
    else:
        assert open_image(io.BytesIO(content)).size == (11, 7)


@pytest.fixture
def parquet(tmp_path):
    """A data folder with one parquet file, next to another folder."""
    pictures = [Image.new("RGB", (8, 8))] * 5
    pictures[0].save(tmp_path / "secret.png")
    parquet_folder(tmp_path / "secret", {"train": pictures})
    return parquet_folder(tmp_path / "data", {"train": pictures[:3]})


@pytest.mark.parametrize("path", ["/etc/hostname.png", "http://127.0.0.1:9/x.png", "../secret.png"])
def test_images_outside_of_the_data_folder_are_refused(parquet, path):
    file = next(parquet.glob("*.parquet"))
    table = pyarrow.parquet.read_table(file)
    images = pyarrow.array([{"bytes": None, "path": path}] * 3, table["img"].type)
    pyarrow.parquet.write_table(table.set_column(0, table.schema.field("img"), images), file)
    with pytest.raises(ValueError, match="expected images inside"):
        open_images(DataConfig(name=str(parquet)))


@pytest.mark.parametrize(
    "settings",
    [
        {"data_files": "../secret/*.parquet"},
        {"data_files": [{"split": "train", "path": ["*.parquet", "TMP/secret/*.parquet"]}]},
        {"data_files": "http://127.0.0.1:9/x.parquet"},
        {"data_dir": "../secret"},
    ],
    ids=str,
)
def test_what_the_metadata_of_a_data_folder_names_is_not_read(parquet, settings):
    text = json.dumps({"configs": [{"config_name": "default", **settings}]})
    text = text.replace("TMP", str(parquet.parent))
    (parquet / "README.md").write_text(f"---\n{text}\n---\n")
    (parquet / ".huggingface.yaml").write_text(text)
    for name in (parquet, parquet / ".." / "data"):
        assert len(open_images(DataConfig(name=str(name))).labels["train"]) == 3


def test_data_files_inside_the_folder_are_read_through_links(parquet):
    (parquet.parent / "mine").mkdir()
    (parquet.parent / "mine" / "link").symlink_to(parquet)
    found = open_images(DataConfig(name=str(parquet.parent / "mine")))
    assert len(found.labels["train"]) == 3


def test_other_files_in_a_folder_of_images_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = image_folder(tmp_path / "data", {"cat": 3, "dog": 2})
    (folder / "data.py").write_text("open('executed', 'w')")
    (folder / "metadata.csv").write_text("file_name,label\n../secret.png,0\n")
    source = open_images(DataConfig(name="data"))
    assert source.classes == ("cat", "dog") and source.labels["train"].tolist() == [0, 0, 0, 1, 1]
    files = {source.images["train"].path(row) for row in range(5)}
    assert files == {str(path) for path in folder.rglob("*.png")}
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.toml", "a = " + "[" * 100_000),
        ("metrics.json", '{"test": {"top1": "high"}}'),
        ("sha256.json", "[" * 100_000),
        ("history.jsonl", '{"epoch": "one"}\n'),
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


def test_a_data_folder_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"(?s)^data\.name: got .*Arrow"):
        open_images(DataConfig(name=str(tmp_path)))
