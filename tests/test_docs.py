"""README.md and docs/: tables are rendered, names exist, examples run, commands parse."""

import ast
import csv
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from result_tables import result_tables

from sa_zoo.cli import app
from sa_zoo.folders.write import read_json

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
THEOREM = (ROOT / "docs" / "theorem.md").read_text(encoding="utf-8")
# What a row of a table of theorem.md is about, and the rest of the row.
ROWS = dict(
    re.findall(
        r"^\| ((?:Eq|Lemma|Theorem|Section|Appendix)[^|]*?) \|(.*)$",
        THEOREM.replace(r"\|", ""),
        re.MULTILINE,
    )
)
NAMES = sorted(set(re.findall(r"`(sa_zoo\.[\w.]+)`", THEOREM)))
TESTS = sorted(set(re.findall(r"`(tests/\w+\.py::\w+)`", THEOREM)))


@pytest.fixture(scope="module")
def render():
    return runpy.run_path(str(ROOT / "scripts" / "render_docs.py"))["render"]


@pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)
def test_rendering_again_changes_nothing(path, render):
    text = path.read_text(encoding="utf-8")
    assert render(text) == text


def test_tables_of_results_are_those_of_the_metrics_and_measurements():
    tables = result_tables()
    assert set(tables) == set((ROOT / "results").iterdir())
    for path, text in tables.items():
        assert path.read_text(encoding="utf-8") == text, "python scripts/render_docs.py"
    with (ROOT / "results" / "results-cifar10-jpeg75.csv").open(encoding="utf-8") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    metrics = read_json(ROOT / "model_cards" / "sa_learned_tiny_cifar" / "metrics.json")
    seeds = (ROOT / "model_cards" / "sa_learned_tiny_cifar" / "results").glob("seed-*.json")
    tests = [run["test"]["top1"] for run in (metrics, *map(read_json, seeds))]
    row = rows["sa_learned_tiny_cifar"]
    assert float(row["top1"]) == pytest.approx(100 * sum(tests) / 3, abs=1e-3)
    assert (row["seeds"], row["param_count"], row["macs"]) == ("3", "0.81", "0.071")
    assert float(row["top1"]) + float(row["top1_err"]) == pytest.approx(100)


def test_a_wrong_number_would_be_rendered_away(render):
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "12,086,844" in text
    assert render(text.replace("12,086,844", "12,086,845")) == text


def test_tables_of_benchmarks_have_a_column_or_a_part_per_machine(tmp_path, monkeypatch):
    names = runpy.run_path(str(ROOT / "scripts" / "render_docs.py"))
    monkeypatch.setitem(names["speed"].__globals__, "ROOT", tmp_path)
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    case = {"model": "sa_quadratic_cifar", "phase": "training, float32", "images": 7}
    for number, title in enumerate(("one", "two"), start=2):
        row = {**case, "subject": "as built", "speed": 1.5 * number, "memory": 1 / number}
        other = {**case, "subject": "a route that has gone", "speed": 9.0, "memory": 9.0}
        conditions = {"rounds": 3, "load": 0.5, "threads": number}
        run = {"command": f"typed on {title}", "conditions": conditions, "rows": [other, row]}
        machine = {"title": title, "notes": ["idle"], "runs": [run]}
        (tmp_path / "docs" / "benchmarks" / f"{title}.json").write_text(json.dumps(machine))
    head, _, *lines = names["speed"]().splitlines()
    assert head == "| speed, memory | one | two |"
    assert "| training step | 3x, 0.5x | 4.5x, 0.333x |" in lines
    assert not any("9x" in line for line in lines)
    page = names["benchmarks"]()
    for number, title in enumerate(("one", "two"), start=2):
        part = page[page.index(f"## {title}\n") :]
        assert f"- `typed on {title}`: 3 rounds, load 0.5 before\n" in part
        assert f"threads {number}" in part
    assert page.count("| sa_quadratic_cifar | training, float32 | as built | 7 |") == 2


def test_links_lead_somewhere():
    for document in (README, *DOCS):
        text = document.read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!http)([^)#]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        for link in links:
            assert (document.parent / link).is_file(), (document.name, link)


def commands() -> list[str]:
    texts = [path.read_text(encoding="utf-8").replace("\\\n", " ") for path in (README, *DOCS)]
    texts = [
        re.sub(r"<!-- rendered: benchmarks -->.*<!-- end -->", "", text, flags=re.DOTALL)
        for text in texts
    ]
    found = [
        command
        for text in texts
        for command in re.findall(r"(?:sa-zoo|-m sa_zoo) ([a-z][^`#\n]*)", text)
    ]
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


@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_walk_through_the_theorem_exist(name):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return
    pytest.fail(f"no module of {name}")


@pytest.mark.parametrize("name", TESTS)
def test_tests_in_the_walk_through_the_theorem_exist(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_equation_and_lemma_has_its_function_and_its_test():
    subjects = " ".join(ROWS)
    assert all(re.search(rf"\bEq\. {number}\b", subjects) for number in range(1, 11))
    assert all(
        subject in subjects
        for subject in ("Lemma 1", "Lemma 2", "Theorem 1", "Section 4.2", "Section 4.3")
    )
    for subject, row in ROWS.items():
        assert any(f"`{name}`" in row for name in NAMES), subject
        assert any(f"`{name}`" in row for name in TESTS), subject


def test_the_three_functions_for_vision_transformers_run(tmp_path):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "vit.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([18]) torch.Size([9])" in done.stdout  # Delta and alpha
    heads = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(heads) == 6 and sum(map(len, heads)) == 4


CHECKS = """
import warnings
from pathlib import Path
import timm, torch
from laplacian import Laplacian
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification
import sa_zoo
from sa_zoo.folders.opened import open_folder
from sa_zoo.kernels.choose import only
from sa_zoo.training.config import load_config
from sa_zoo.verbs.fit import fit

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
changes = [f"model.name={name}", "model.args={" + sizes + "}", "train.epochs=2"]
fit(load_config("quickstart", changes), folder)
trained = open_folder(folder).network
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
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    (tmp_path / "laplacian.py").write_text(example)
    (tmp_path / "checks.py").write_text(CHECKS)
    command = [sys.executable, "-W", "error", str(tmp_path / "checks.py")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
