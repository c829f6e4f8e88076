"""The architecture as a rule: which file may import which, and what importing costs."""

import ast
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sa_zoo"
FILES = sorted(PACKAGE.rglob("*.py"))
# From the ground floor up: a folder, or a file of the package itself, imports only from floors before its own.
FLOORS = [
    {"models"},
    {"kernels"},
    {"convolution"},
    {"vit"},
    {"cost"},
    {"folders"},
    {"interchange"},
    {"training", "publishing", "analysis"},
    {"verbs"},
    {"__init__", "cli"},
    {"__main__"},
]
LONGEST_CHAIN = 7


def module_of(path: Path) -> str:
    """Dotted name within the package: "models.attention", "cli"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules of this package that a file imports, anywhere in it."""
    found = set()
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["sa_zoo", *package][: len(package) + 2 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "sa_zoo" or name.startswith("sa_zoo."):
                parts = name.split(".")[1:]
                while parts and not (PACKAGE / Path(*parts)).with_suffix(".py").is_file():
                    parts.pop()
                found.add(".".join(parts) or "__init__")
    return frozenset(found)


IMPORTS = {module_of(path): imports_of(path) for path in FILES}


def folder_of(module: str) -> str:
    return module.partition(".")[0]


def floor_of(module: str) -> int:
    (floor,) = [number for number, floor in enumerate(FLOORS) if folder_of(module) in floor]
    return floor


def chain_from(module: str, seen: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain of imports within a folder that starts at a module."""
    assert module not in seen, f"import cycle: {' > '.join((*seen, module))}"
    inside = [name for name in IMPORTS[module] if folder_of(name) == folder_of(module)]
    chains = [chain_from(name, (*seen, module)) for name in inside]
    return (module, *max(chains, key=len, default=()))


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_go_down_the_floors(module):
    for name in IMPORTS[module]:
        if name == "__init__" and module in ("cli", "verbs.fit", "verbs.explore"):
            continue  # they import the package for its registrations
        same = folder_of(name) == folder_of(module) and "." in module
        assert same or floor_of(name) < floor_of(module), (
            f"{module} imports {name}, which is not below it"
        )


@pytest.mark.parametrize("module", IMPORTS)
def test_no_import_cycles_and_no_long_chains_inside_a_folder(module):
    chain = chain_from(module) if "." in module else (module,)
    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)


def test_published_code_lies_in_one_folder():
    reached, waiting = set(), ["models.modeling_sa"]
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting += IMPORTS[module] - reached
    assert all(folder_of(module) == "models" for module in reached)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_interfaces_know_timm_and_transformers(path):
    timm = {"timm_models", "timm_network", "timm_backbones", "layer_conversion"}
    transformers = {"configuration_sa", "modeling_sa"}
    if path.parent.name in ("models", "kernels", "convolution"):
        text = path.read_text(encoding="utf-8")
        for library, known in (("timm", timm), ("transformers", transformers)):
            imported = f"import {library}" in text or f"from {library}" in text
            assert path.stem in known or not imported


def test_the_definition_asks_nothing_about_how_it_runs():
    source = (PACKAGE / "models" / "attention.py").read_text(encoding="utf-8")
    questions = ("is_scripting", "is_tracing", "is_compiling", "is_grad_enabled", "is_cpu", "cuda")
    assert not any(question in source for question in questions)


def test_importing_the_package_for_timm_does_not_import_transformers():
    code = "import sys, sa_zoo, timm; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "False"


def test_floors_name_every_folder_and_file():
    known = set().union(*FLOORS)
    assert {folder_of(module) for module in IMPORTS} - {"__init__"} <= known | {"__init__"}
    assert all(not (low & high) for low, high in pairwise(FLOORS))
