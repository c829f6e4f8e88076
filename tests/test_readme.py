"""README.md, typed from its first command to its last in a fresh folder, with the package as it is installed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from programs import without_network
from tiny_runs import image_folder

import sa_zoo  # noqa: F401  registers the names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
]
PYTHON = [block for language, block in BLOCKS if language == "python"]

CLONED = (
    "sa_zoo configs model_cards results MANIFEST.in tests pyproject.toml setup.py README.md LICENSE"
)
PACKAGES = Path(torch.__file__).parents[1]  # torch, timm and others
LAUNCH = "accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --dynamo_backend no"
SMALL = (
    "--set data.name=data/images --set train.epochs=1 --set train.batch_size=7 --set augment.small_epochs=0"
    " --set model.args='{ depth = 2, embed_dim = 7, hidden_dim = 11, num_heads = 2 }'"
)
# All commands are typed as they stand, except for those that need a network or hours. The first half of a row is the
# end of a command; its second half is typed instead of that.
STAND_INS = {
    "git clone --depth 1 ADDRESS sa_zoo": f"mkdir sa_zoo && (cd {ROOT} && cp -r {CLONED} ~/sa_zoo)"
    " && cp -r files/* sa_zoo",
    # which downloads nothing: the environment sees the packages of this one, except for setuptools as old as Python
    ". .venv/bin/activate": ". .venv/bin/activate && rm -rf .venv/lib/python*/site-packages/setuptools*"
    f" && echo {PACKAGES} > $(echo .venv/lib/python*/site-packages)/packages.pth",
    "sa-zoo train quickstart": "sa-zoo train quickstart --set train.epochs=1",
    "pytest": "python -m pytest -n 0 -q tests/test_metrics.py",
    "photographs --data data/images": "photographs --data data/images --model sa_plain_tiny_cifar --epochs 1"
    " --batch-size 7 --set train.head_epochs=1 --set data.image_size=32 --out runs/photographs",
    "--out runs/seed1": f"--out runs/seed1 {SMALL}",
    "accelerate launch -m sa_zoo train paper": f"python -m {LAUNCH} -m sa_zoo train paper {SMALL}"
    " --set train.precision=no",
}
# A script as timm's validate.py, which is not in its wheel: it never heard of this package.
VALIDATE = """
import argparse, timm, torch
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model")
arguments = parser.parse_args()
print("logits", tuple(timm.create_model(arguments.model, pretrained=True)(torch.zeros(1, 3, 32, 32)).shape))
"""


def typed_for(command: str) -> str:
    for end, stand_in in STAND_INS.items():
        command = re.sub(rf"(?<!\S){re.escape(end)}(?= &&|$)", lambda _, new=stand_in: new, command)
    return command


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Runs a command after all of the README's were typed: in the same clone and the same environment."""
    home = tmp_path_factory.mktemp("readme")
    files = home / "files"
    image_folder(files / "data/images/train", {"cat": 23, "dog": 17})
    image_folder(files / "data/images/test", {"cat": 3, "dog": 2})
    Image.new("RGB", (53, 41)).save(files / "cat.jpg")
    network = timm.create_model("sa_quadratic_tiny_cifar")
    checkpoint = {"arch": "sa_quadratic_tiny_cifar", "state_dict": network.state_dict()}
    torch.save(checkpoint, files / "model_best.pth.tar")
    script = files / "path/to/timm/validate.py"
    script.parent.mkdir(parents=True)
    script.write_text(VALIDATE)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "CXX": "false",  # no compiler
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}",
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip spells --no-build-isolation
        "PIP_NO_DEPS": "1",
    }
    environment.pop("PYTHONPATH", None)

    def run(*commands: str, folder: Path) -> str:
        script = "\n".join(["set -e", *commands])
        done = subprocess.run(
            without_network("bash", "-c", script),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    lines = [f"echo {shlex.quote('$ ' + command)}\n{typed_for(command)}" for command in COMMANDS]
    printed = run(*lines, folder=home)
    return lambda *lines: run(". .venv/bin/activate", *lines, folder=home / "sa_zoo"), printed


def test_every_command_of_the_readme_works_on_a_fresh_machine(typed):
    run, printed = typed
    assert re.findall(r"^\$ (.*)", printed, re.MULTILINE) == COMMANDS
    assert " passed in " in printed and "logits (1, 10)" in printed
    where = run("cd /; python -c 'import sa_zoo; print(sa_zoo.__file__)'").strip()
    assert ".venv" in where and not list(Path(where).parent.rglob("*.so"))
    left = "page.html mine/README.md mine.onnx mhsa/README.md runs/taps runs/photographs/README.md"
    run(f"ls {left}")


def test_the_python_of_the_readme_runs_in_one_session(typed):
    run, _ = typed
    run(f"python -c {shlex.quote(''.join(PYTHON))}", "test -f explorer.html")
