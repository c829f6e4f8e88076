"""README.md and docs/: tables are rendered, examples run, and commands parse."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sa_zoo.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))


def test_rendering_again_gives_the_same_tables(tmp_path):
    for name in ("scripts", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("results", "model_cards"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = README.read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text.replace("11,173,962", "11,173,963"))
    run("scripts/render.py", folder=tmp_path)
    for path in (README, *DOCS):
        again = tmp_path / path.relative_to(ROOT)
        assert again.read_text() == path.read_text(), f"{path.name}: python scripts/render.py"


def commands() -> list[str]:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (README, *DOCS))
    found = re.findall(r"(?:sa-zoo|-m sa_zoo) ([a-z][^`#\n]*)", texts.replace("\\\n", " "))
    return sorted({command.partition(" && ")[0].strip() for command in found})


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_documents_exist_with_their_options(command):
    verb, *arguments = shlex.split(command)
    known = typer.main.get_command(app).commands[verb]
    if verb != "run":
        options = {option for parameter in known.params for option in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= options
    if verb == "train" and arguments[0] not in ("...", "NAME"):
        assert (ROOT / "configs" / f"{arguments[0]}.toml").is_file()


def python_of(document: str) -> str:
    """The one example in a document."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return example


def run(*arguments, folder) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_for_vision_transformers_runs(tmp_path):
    printed = run("-c", python_of("vit.md"), folder=tmp_path)
    assert printed.splitlines() == ["torch.Size([18]) torch.Size([9])", "torch.Size([2, 1000])"]


CHECKS = """
import warnings
from pathlib import Path
import timm, torch
from laplacian import Laplacian
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification
import sa_zoo
from sa_zoo.fast.route import only

torch.manual_seed(0)
term, X = Laplacian(5, 3, (7, 11)), torch.randn(2, 7, 11, 5)
scores = term(X)
assert scores.shape == (3, 77, 77)
dy, dx = 6 - 1, 2 - 10  # from the query (1, 10) to the key (6, 2)
expected = -term.spread * ((dy - term.Delta[:, 0]).abs() + (dx - term.Delta[:, 1]).abs())
assert torch.allclose(scores[:, 1 * 11 + 10, 6 * 11 + 2], expected)

name, small = "sa_laplacian_tiny_cifar", {"embed_dim": 16, "depth": 2, "num_heads": 3, "hidden_dim": 13}
net = timm.create_model(name, **small)
assert name in timm.list_models("sa_laplacian*") and net.pretrained_cfg["input_size"] == (3, 32, 32)
x = torch.randn(2, 3, 32, 32)
net(x).logsumexp(1).sum().backward()
assert all(p.grad is not None for p in net.parameters())
with torch.no_grad(), only("definition"):
    expected = net.eval()(x)
with torch.no_grad(), only("by axes"):
    assert torch.allclose(net(x), expected, atol=1e-5)
with torch.no_grad():
    assert torch.allclose(net(x), expected, atol=1e-5)
    assert net(torch.randn(1, 3, 20, 44)).shape == (1, 10)  # any size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        assert torch.allclose(torch.jit.script(net)(x), expected, atol=1e-5)
assert net.no_weight_decay() == {name for name, _ in net.named_parameters() if ".terms." in name}

folder = Path(__file__).with_name("run")
sizes = ", ".join(f"{key} = {size}" for key, size in small.items())
changes = [f"model.name={name}", "model.args={" + sizes + "}", "train.epochs=1"]
trained = sa_zoo.train("quickstart", folder, changes=changes).network
assert type(trained.blocks[0].attn.terms[0]) is Laplacian
x = torch.randn(2, *trained.pretrained_cfg["input_size"])
with torch.no_grad():
    expected = trained(x)
    assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x), expected)
    for loader in (AutoModelForImageClassification, TimmWrapperForImageClassification):
        assert torch.equal(loader.from_pretrained(folder)(x).logits, expected)
"""


def test_the_worked_example_runs(tmp_path):
    """In a process of its own, as it registers a name."""
    (tmp_path / "laplacian.py").write_text(python_of("extend.md"))
    (tmp_path / "checks.py").write_text(CHECKS)
    run(tmp_path / "checks.py", folder=ROOT)
