"""Models of a Hub: cached, checked and of one revision. test_readme.py runs all commands without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer, Repository
from model_folders import make_run
from programs import watched

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hub(tmp_path):
    """A Hub with one model, and how a process reaches it."""
    with HubServer() as server:
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        server.repositories["you/tiny"] = Repository()
        yield server, {**os.environ, **environment}


def commit(server: HubServer, run: Path) -> str:
    files = {path.name: path.read_bytes() for path in run.iterdir()} | {"evil.bin": b"\x80\x02"}
    return server.repositories["you/tiny"].commit(files)


def test_a_model_of_the_hub_loads_from_the_cache(hub, tmp_path):
    server, environment = hub
    commit(server, make_run(tmp_path / "run", "test_vit"))
    code = "import sa_zoo; assert sa_zoo.open('hf-hub:you/tiny').metrics.test.n == 1009"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert server.count("evil.bin") == 0
    assert not list((tmp_path / "home").rglob("evil.bin"))
    server.server_close()
    asked, _ = watched(tmp_path, code, HF_ENDPOINT=server.url)
    assert str(server.server_port) in asked  # it does without


def test_the_checked_revision_loads_though_the_hub_changes(hub, tmp_path):
    server, environment = hub
    commit(server, make_run(tmp_path / "first", "test_vit", num_classes=7))
    second = make_run(tmp_path / "second", "test_vit", num_classes=11)
    server.faults = {"GET .*/model.safetensors": lambda: commit(server, second)}
    code = "import sa_zoo; assert sa_zoo.open('hf-hub:you/tiny').network.num_classes == 7"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert len(server.repositories["you/tiny"].commits) == 2
