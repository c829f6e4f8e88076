"""Folders and images of somebody hostile: a clear error, no code executed, nothing written, nothing fetched."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hostile import FOLDERS, IMAGES
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
        create_model(ModelConfig(name="sa_quadratic_cifar", init=f"local-dir:{folder}"), 7)
    assert state_of(folder.parent) == before
