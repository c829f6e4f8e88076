"""The architecture as a rule: which file may import which, what importing costs, what must not be in the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sa_zoo"
# Each tower from its ground floor up: a file imports only from files before it.
TOWERS = {
    "models": [
        *(
            "positions",
            "products",
            "by_axes",
            "fused",
            "terms",
            "content_terms",
            "attention",
            "network",
            "timm_models",
            "yardsticks",
            "reference",
        ),
        *("theorem", "padding", "slices", "patches", "convolution", "soft", "content", "conversion", "certificate"),
        *("network_conversion", "timm_backbones", "converted_folder"),
        *("configuration_sa", "modeling_sa", "export", "registration"),
    ],
    "training": [
        *("config", "augment", "data", "model", "evaluate", "checkpoint", "progress", "run_folder", "loop", "train"),
    ],
    "publishing": ["cost", "card", "folder", "catalogue", "remote", "hub"],
    "analysis": ["figures", "timing", "benchmark", "scaling"],
}


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, anywhere in it, as dotted names without the package's own."""
    found = set()
    package = ["sa_zoo", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("sa_zoo.") for name in names if name.startswith("sa_zoo.")}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_towers_do_not_import_each_other_and_nothing_imports_the_command_line(path):
    tower = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else None
    for name in imports_of(path):
        assert not name.startswith("cli") or path.stem == "__main__", f"{path.name} imports the command line"
        if tower is not None:
            assert name.split(".")[0] == tower, f"{path.name} imports {name} of another tower"


@pytest.mark.parametrize("tower", TOWERS)
def test_imports_go_down_the_floors(tower):
    floors = TOWERS[tower]
    files = {path.stem for path in (PACKAGE / tower).glob("*.py")} - {"__init__"}
    assert files == set(floors), "every file of the tower has its floor"
    for floor, stem in enumerate(floors):
        for name in imports_of(PACKAGE / tower / f"{stem}.py"):
            below = name.split(".")[1]
            assert below in floors[:floor], f"{stem} imports {below}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_faces_know_timm_and_transformers(path):
    pure = {
        "positions",
        "products",
        "by_axes",
        "fused",
        "terms",
        "attention",
        "network",
        "theorem",
        "padding",
        "slices",
        "patches",
        "convolution",
    }
    if path.parent.name == "models" and path.stem in pure | {"soft", "content", "certificate"}:
        text = path.read_text(encoding="utf-8")
        assert "import timm" not in text and "from timm" not in text
        assert "import transformers" not in text and "from transformers" not in text


def test_importing_the_package_for_timm_does_not_import_transformers():
    code = "import sys, sa_zoo, timm; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "False"
