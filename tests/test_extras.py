"""An installation without extras: models by name work, everything else names its extra."""

import re
import subprocess
import sys

from sa_zoo.extras import EXTRAS

CASES = [
    ("typer", "import sa_zoo.__main__ as main; main.main()", "train"),
    ("transformers", "import sa_zoo.__main__ as main; main.main()", "hf"),
    ("pydantic", "import sa_zoo; sa_zoo.open", "train"),
    ("jinja2", "import sa_zoo; sa_zoo.explore", "explore"),
]
# `tqdm` stays, as torch and timm bring it.
ALL = [name for libraries in EXTRAS.values() for name in libraries if name != "tqdm"]
PROGRAM = f"""
import os, sys
sys.modules |= dict.fromkeys({ALL})
import timm, torch, sa_zoo

network = timm.create_model("sa_quadratic_tiny_cifar", pretrained=True)
sa_zoo.harden(network)
network(torch.zeros(1, 3, 32, 32)).sum().backward()
sa_zoo.certificate(sa_zoo.attention_from_conv(torch.nn.Conv2d(3, 5, 3), alpha=7.0), (11, 13))
sa_zoo.convert(timm.create_model("resnet_tiny_cifar"), layers="layer4.*", alpha=4.0)

for name in {ALL}:
    del sys.modules[name]
for missing, code, _ in {CASES}:
    if not os.fork():
        sys.modules[missing] = None
        exec(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
"""


def test_a_missing_library_is_one_sentence_that_names_the_extra():
    command = [sys.executable, "-c", PROGRAM, "train", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"got no .*", done.stderr)
    assert found == [
        f"got no {missing}, expected it: pip install 'sa_zoo[{extra}]'"
        for missing, _, extra in CASES
    ]
