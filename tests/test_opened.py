"""A model is opened once: checked, built and read once, whatever a command then does with it."""

from collections import Counter
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import timm
import torch
from model_folders import make_run
from tiny_runs import tiny_config

from sa_zoo.folders import check, opened
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.folders.opened import open_folder, open_model
from sa_zoo.training.train import train
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


def test_finishing_a_run_builds_the_network_once_and_reads_its_weights_once(tmp_path, monkeypatch):
    model = {"name": "sa_quadratic_tiny_cifar", "args": SMALL}
    out = tmp_path / "run"
    train(tiny_config(model=model, data={"image_size": 16}, train={"epochs": 1}), out)
    built = []
    read = Counter()
    create = timm.create_model

    class Watched:
        """safe_open, with the tensors counted that are read from model.safetensors."""

        def __init__(self, path, *arguments, **options):
            self.path = Path(path)
            self.file = safetensors.safe_open(path, *arguments, **options)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            if self.path.name == "model.safetensors":
                read[name] += 1
            return self.file.get_tensor(name)

        def get_tensors(self):
            found = self.file.get_tensors()
            if self.path.name == "model.safetensors":
                read.update(found.keys())
            return found

    monkeypatch.setattr(timm, "create_model", lambda *a, **k: built.append(a) or create(*a, **k))
    monkeypatch.setattr(safetensors.torch, "safe_open", Watched)
    monkeypatch.setattr(check, "safe_open", Watched)
    found = finish_folder(out)
    assert len(built) == 1
    assert read == Counter(dict.fromkeys(found.network.state_dict(), 1))
    assert (out / "figures" / "head_maps.png").is_file() and (out / "explorer.html").is_file()
    monkeypatch.setattr(opened, "build_model", None)  # nothing is opened again
    assert finish(found) == found
