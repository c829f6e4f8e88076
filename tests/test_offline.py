"""Everything but publishing works without a network, and does not even try to reach one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hub_server import HubServer, Repository
from model_folders import make_run
from tiny_runs import image_folder

ROOT = Path(__file__).parents[1]
# In every Python process of a command, workers included: what asks for an address or a connection is written down.
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
import sa_zoo
from sa_zoo.cli import app

def sa_zoo_command(*arguments):
    app([str(argument) for argument in arguments], standalone_mode=False)

small = ["--set", "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }", "--set", "train.epochs=1"]
sa_zoo_command("train", "quickstart", "--out", "digits", *small)
for bound in (2**31, 0):  # also by worker processes
    sa_zoo.training.splits.KEPT_BYTES = bound
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


def without_network(*command: str) -> list[str]:
    """The command in a network namespace of its own, where the system allows it."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if (
        shutil.which("unshare")
        and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    ):
        return [*unshare, *command]
    return list(command)


def watched(folder: Path, code: str, **variables: str) -> str:
    """Run code in a folder without a network; what it asked of one."""
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    log = folder / "watch" / "log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "PYTHONPATH": f"{folder / 'watch'}:{ROOT}",
        "WATCHED": str(log),
        "HF_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        without_network(sys.executable, "-c", code),
        env=environment | variables,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return log.read_text() if log.exists() else ""


def test_the_watch_sees_a_connection(tmp_path):
    code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9))\nexcept OSError:\n    pass"
    assert "socket.connect" in watched(tmp_path, code)


def test_nothing_but_publishing_uses_a_network(tmp_path):
    image_folder(tmp_path / "images", {"train/a": 7, "train/b": 5, "test/a": 2, "test/b": 3})
    make_run(tmp_path / "cnn", "resnet_tiny_cifar", channels=(3, 3, 5, 5))
    code = COMMANDS.replace("import sa_zoo\n", "import sa_zoo, sa_zoo.training.splits\n")
    assert watched(tmp_path, code) == ""


def test_a_model_of_the_hub_loads_from_the_cache(tmp_path):
    run = make_run(tmp_path / "test_vit", "test_vit", num_classes=7)
    hub = HubServer()
    repository = hub.repositories["you/tiny"] = Repository(private=False)
    repository.commit(
        {path.name: path.read_bytes() for path in run.iterdir()} | {"evil.bin": b"\x80\x02"}
    )
    code = "import sa_zoo.folders.opened as m; print(m.open_model('hf-hub:you/tiny').network.num_classes)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=tmp_path)
    hub.shutdown()
    hub.server_close()
    assert hub.count("evil.bin") == 0 and not list((tmp_path / "home").rglob("evil.bin"))
    assert str(hub.server_port) in watched(
        tmp_path, code, HF_ENDPOINT=hub.url
    )  # it asks, and does without


def test_what_was_checked_is_what_loads_when_its_repository_changes_in_between(tmp_path):
    hub = HubServer()
    repository = hub.repositories["you/tiny"] = Repository(private=False)

    def commit(classes: int) -> str:
        run = make_run(tmp_path / f"classes{classes}", "test_vit", num_classes=classes)
        return repository.commit({path.name: path.read_bytes() for path in run.iterdir()})

    first = commit(7)
    code = "import timm, sa_zoo.folders.check\nwith sa_zoo.folders.check.checked('hf-hub:you/tiny') as source:"
    code += "\n print(source, flush=True); input(); print(timm.create_model(source, pretrained=True).num_classes)"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == f"hf-hub:you/tiny@{first}\n"
        commit(11)
        assert process.communicate("\n") == ("7\n", None)
    hub.shutdown()
    hub.server_close()
