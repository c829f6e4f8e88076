"""Everything but publishing works without a network, and does not even try to reach one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer, Repository
from model_folders import make_run
from programs import without_network
from tiny_runs import image_folder

ROOT = Path(__file__).parents[1]
# In every Python process of a command, workers included: a request for an address or a connection is written down.
WATCH = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        if not (event == "socket.connect" and isinstance(arguments[1], (str, bytes))):  # between processes
            with open(os.environ["WATCHED"], "a") as log:
                log.write(f"{event} {arguments[1:] if event == 'socket.connect' else arguments}\\n")

sys.addaudithook(watch)
"""
COMMANDS = """
import sys
from pathlib import Path
import sa_zoo, sa_zoo.data.splits
from sa_zoo.cli import app

def sa_zoo_command(*arguments):
    app([str(argument) for argument in arguments], standalone_mode=False)

small = ["--set", "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }", "--set", "train.epochs=1"]
sa_zoo_command("train", "quickstart", "--out", "digits", *small)
for bound in (2**31, 0):  # also by worker processes
    sa_zoo.data.splits.KEPT_BYTES = bound
    data = ["--set", "data.name=images", "--set", "train.batch_size=5"]
    sa_zoo_command("train", "quickstart", "--out", f"images-{bound}", *small, *data)
sa_zoo_command("evaluate", "digits", "--detail")
sa_zoo_command("card", "digits")
sa_zoo_command("publish", "digits", "--repo-id", "you/tiny", "--dry-run")
sa_zoo_command("convert", "cnn", "--out", "converted", "--data", "digits")
sa_zoo_command("train", "quickstart", "--out", "tuned", "--set", "model.init=local-dir:digits", *small)

from transformers import AutoImageProcessor, AutoModelForImageClassification
AutoImageProcessor.from_pretrained("digits")
AutoModelForImageClassification.from_pretrained("digits").save_pretrained("saved")
"""


def watched(folder: Path, code: str, **variables: str) -> str:
    """Run code without a network, where the system allows it; the addresses that it asked for."""
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    log = folder / "watch" / "log"
    log.touch()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"PYTHONPATH": f"{folder / 'watch'}:{ROOT}", "HF_HOME": str(folder / "home")}
    environment |= {"WATCHED": str(log)} | variables
    command = without_network(sys.executable, "-c", code)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return log.read_text()


def test_nothing_but_publishing_uses_a_network(tmp_path):
    image_folder(tmp_path / "images", {"train/a": 7, "train/b": 5, "test/a": 2, "test/b": 3})
    make_run(tmp_path / "cnn", "resnet_tiny_cifar", channels=(3, 3, 5, 5))
    assert watched(tmp_path, COMMANDS) == ""


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
    asked = watched(tmp_path, code, HF_ENDPOINT=server.url)
    assert str(server.server_port) in asked  # it does without


def test_the_checked_revision_loads_though_the_hub_changes(hub, tmp_path):
    server, environment = hub
    commit(server, make_run(tmp_path / "first", "test_vit", num_classes=7))
    second = make_run(tmp_path / "second", "test_vit", num_classes=11)
    server.faults = {"GET .*/model.safetensors": lambda: commit(server, second)}
    code = "import sa_zoo; assert sa_zoo.open('hf-hub:you/tiny').network.num_classes == 7"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert len(server.repositories["you/tiny"].commits) == 2
