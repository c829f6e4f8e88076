"""The architecture as a rule: which file may import which.

Nothing is below models/, so that it can be published alone: transformers takes code from one folder.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sa_zoo"
FILES = sorted(PACKAGE.rglob("*.py"))
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


def module_of(path: Path) -> str:
    """Dotted name within the package: "models.attention", "cli"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


TREES = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imports_of(module: str) -> set[str]:
    """Modules of this package that a module imports, anywhere in it."""
    found = set()
    package = module.split(".")[:-1]
    for node in ast.walk(TREES[module]):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["sa_zoo", *package][: len(package) + 2 - node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "sa_zoo":
                parts = name.split(".")[1:]
                while parts and ".".join(parts) not in TREES:
                    parts.pop()
                found.add(".".join(parts) or "__init__")
    return found


IMPORTS = {module: imports_of(module) for module in TREES}


def floor_of(module: str) -> int:
    (floor,) = [number for number, some in enumerate(FLOORS) if module.split(".")[0] in some]
    return floor


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_go_down_the_floors(module):
    for name in IMPORTS[module]:
        same = "." in module and name.split(".")[0] == module.split(".")[0]
        command_line = (module, name) == ("cli", "__init__")
        assert same or command_line or floor_of(name) < floor_of(module), f"{module} imports {name}"


def test_importing_for_timm_does_not_import_transformers():
    code = "import sys, sa_zoo, timm; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
