"""Models of a Hub: cached, checked and of one revision. test_readme.py runs all commands without a network."""

import os
import subprocess
import sys
from pathlib import Path

from hub_server import HubServer, Repository
from model_folders import make_run
from programs import watched

ROOT = Path(__file__).parents[1]


def test_the_checked_revision_of_a_hub_loads_and_then_the_cache(tmp_path):
    """The Hub changes after the check, and is gone when the model is loaded again."""
    code = "import sa_zoo; assert sa_zoo.open('hf-hub:you/tiny').network.num_classes == 7"
    runs = [make_run(tmp_path / str(n), "test_vit", num_classes=n) for n in (7, 11)]
    first, second = (
        {path.name: path.read_bytes() for path in run.iterdir()} | {"evil.bin": b"\x80\x02"}
        for run in runs
    )
    with HubServer() as server:
        server.repositories["you/tiny"] = repository = Repository()
        repository.commit(first)
        server.faults = {"GET .*/model.safetensors": lambda: repository.commit(second)}
        environment = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
        environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True)
        assert len(repository.commits) == 2 and server.count("evil.bin") == 0
    asked, _ = watched(tmp_path, code, HF_ENDPOINT=server.url)
    assert str(server.server_port) in asked  # it does without
