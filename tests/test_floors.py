"""The architecture as a rule: which file may import which.

Nothing is below models/, so that it can be published alone: transformers takes code from one folder.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sa_zoo"
# From the ground floor up: a folder, or a file of the package itself, imports only from floors before its own.
FLOORS = [
    {"models"},
    {"fast"},
    {"convolution"},
    {"vit"},
    {"cost", "extras", "registration", "timm_registration"},
    {"folders"},
    {"data"},
    {"opened"},
    {"training", "publishing", "analysis"},
    {"commands"},
    {"__init__", "cli"},
    {"__main__"},
]


def floor_of(name: str) -> int:
    (floor,) = [number for number, some in enumerate(FLOORS) if name in some]
    return floor


def imports_of(path: Path) -> set[str]:
    """Folders and files of the package itself that a file imports from, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "sa_zoo":
            names = [alias.name for alias in node.names]
            found += [
                f"sa_zoo.{name if list(PACKAGE.glob(name + '*')) else '__init__'}" for name in names
            ]
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, "relative imports stay in their folder"
            found.append(node.module or "")
    return {name.split(".")[1] for name in found if name.startswith("sa_zoo.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_imports_go_down_the_floors(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports_of(path) - {own}:
        command_line = (own, name) == ("cli", "__init__")
        assert command_line or floor_of(name) < floor_of(own), name


def test_importing_for_timm_does_not_import_transformers():
    code = "import sys, sa_zoo, timm; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
