"""A model is opened once: checked, built and read once, whatever a command then does with it."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from damage import flip
from model_folders import make_run

from sa_zoo.folders import opened
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.opened import open_folder, open_model
from sa_zoo.folders.write import write_sums
from sa_zoo.verbs.finish import finish, finish_folder

SMALL = {"embed_dim": 7, "depth": 2, "hidden_dim": 11, "num_heads": 3}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", "sa_quadratic_tiny_cifar", **SMALL)


def test_a_folder_is_opened_with_what_it_says_of_its_network(run):
    found = open_model(str(run))
    assert (found.source, found.folder, found.local_folder) == (f"local-dir:{run}", run, run)
    assert found.config["architecture"] == "sa_quadratic_tiny_cifar"
    assert found.metrics == read_metrics(run) and found.metrics.test.n == 1009
    assert not found.network.training
    assert open_model(f"local-dir:{run}").source == found.source


def test_a_timm_name_has_no_folder():
    found = open_model("sa_quadratic_tiny_cifar")
    assert (found.folder, found.config, found.metrics.measured()) == (None, {}, {"version": 1})
    with pytest.raises(ValueError, match="got sa_quadratic_tiny_cifar, expected a folder on this"):
        _ = found.local_folder


@pytest.mark.parametrize("source", ["runs/typo", "./typo", "local-dir:typo", "/no/where"])
def test_a_folder_that_is_missing_is_said_to_be(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path(source.removeprefix("local-dir:"))
    with pytest.raises(FileNotFoundError, match=f"^model: got {name}, which is not there"):
        open_model(source)


def test_weights_that_are_not_finite_are_refused_however_they_are_stored(run):
    for bad in (float("nan"), float("-inf")):
        weights = safetensors.torch.load_file(run / "model.safetensors")
        weights["blocks.1.fc2.weight"] = weights["blocks.1.fc2.weight"].to(torch.float64)
        weights["blocks.1.fc2.weight"][3, 5] = bad
        safetensors.torch.save_file(weights, run / "model.safetensors")
        with pytest.raises(ValueError, match=r"got NaN or infinity in blocks\.1\.fc2\.weight"):
            open_folder(run)


def test_only_the_files_that_make_the_network_have_to_be_whole_to_read_it(run):
    names = ["explorer.html", "config.json", "model.safetensors"]
    (run / "explorer.html").touch()
    write_sums(run, names)
    (run / "explorer.html").unlink()
    assert open_folder(run).network
    assert (finish_folder(run).local_folder / "explorer.html").is_file(), "made again"
    for name in names[1:]:
        write_sums(run, names)
        flip(run / name)
        with pytest.raises(ValueError, match=f"damaged folder: .*{name} does not match"):
            open_folder(run)
        flip(run / name)


def test_finishing_a_folder_opens_it_once_and_again_changes_nothing(run, monkeypatch):
    found = finish_folder(run)
    assert (run / "figures" / "head_maps.png").is_file() and (run / "explorer.html").is_file()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monkeypatch.setattr(opened, "build_model", None)
    assert finish(found) == found
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
