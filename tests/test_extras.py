"""An installation without extras: models by name work, everything else names its extra."""

import subprocess
import sys

import pytest

from sa_zoo.extras import EXTRAS

ALL = [library for libraries in EXTRAS.values() for library in libraries]
WITHOUT = "import sys; sys.modules |= dict.fromkeys({missing})\n{code}"
CORE = """
import timm, torch, sa_zoo
network = timm.create_model("sa_quadratic_tiny_cifar", pretrained=True)
sa_zoo.harden(network)
network(torch.zeros(1, 3, 32, 32)).sum().backward()
sa_zoo.certificate(sa_zoo.attention_from_conv(torch.nn.Conv2d(3, 5, 3), alpha=7.0), (11, 13))
sa_zoo.convert(timm.create_model("resnet_tiny_cifar"), layers="layer4.*", alpha=4.0)
"""


def run_without(missing: list[str], code: str) -> subprocess.CompletedProcess:
    """`tqdm` stays, as torch and timm bring it."""
    missing = [library for library in missing if library != "tqdm"]
    program = WITHOUT.format(missing=missing, code=code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_models_and_conversions_need_no_extra():
    done = run_without(ALL, CORE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("typer", "import sa_zoo.__main__ as main; main.main()", "train"),
        (
            "accelerate",
            "import sa_zoo.__main__ as main; sys.argv[1:] = ['train', 'quickstart']; main.main()",
            "train",
        ),
        ("accelerate", "import sa_zoo; sa_zoo.train", "train"),
        ("pydantic", "import sa_zoo; sa_zoo.open", "train"),
        ("transformers", "import sa_zoo; sa_zoo.finish", "hf"),
        ("jinja2", "import sa_zoo; sa_zoo.explore", "explore"),
    ],
)
def test_a_missing_library_is_one_sentence_that_names_the_extra(missing, code, extra):
    done = run_without([missing], code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.endswith(f"got no {missing}, expected it: pip install 'sa_zoo[{extra}]'")
