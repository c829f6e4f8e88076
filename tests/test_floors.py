"""The architecture as a rule: which file may import which, how large and dense files are, what importing costs.

Sizes are in tokens, without comments and docstrings: what a reader has to take in. Unlike lines, they do not shrink
when two statements are squeezed into one.
"""

import ast
import io
import subprocess
import sys
import tokenize
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
    {"folders"},
    {"interchange"},
    {"training", "publishing", "analysis"},
    {"verbs"},
    {"__init__", "cli"},
    {"__main__"},
]
# Tokens of Python per folder, with some room; what does not fit is a reason to simplify.
BUDGET = {
    "models": 12_470,
    "kernels": 5_300,
    "convolution": 11_650,
    "vit": 6_000,
    "folders": 4_100,
    "interchange": 2_450,
    "training": 13_400,
    "publishing": 4_650,
    "analysis": 8_150,
    "verbs": 3_400,
    "": 2_050,
}
TOTAL = 73_250
LARGEST_FILE, LARGEST_FUNCTION, LONGEST_CHAIN = 2_500, 350, 6
ATTENTION = 1_100  # tokens of the page that holds the definition
REMOTE_CODE = 10_550  # tokens that somebody who loads a model with trust_remote_code has to read
# What squeezing looks like, per 1,000 lines of code.
MOST_PARALLEL_ASSIGNMENTS, MOST_CONDITIONAL_EXPRESSIONS, MOST_WALRUSES = 8, 18, 2
MOST_TOKENS_PER_LINE, MOST_LONG_LINES = 9.5, 0.03  # long: beyond 100 columns
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


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


@cache
def code_of(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a file, without comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    documented = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    }
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in documented)
    ]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_are_short(path):
    code = code_of(path)
    assert len(code) <= LARGEST_FILE
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            size = sum(node.lineno <= token.start[0] <= node.end_lineno for token in code)
            assert size <= LARGEST_FUNCTION, f"{node.name} in {path.name} has {size} tokens"


def test_folders_stay_within_their_budget():
    tokens = dict.fromkeys(BUDGET, 0)
    for path in FILES:
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
        tokens[folder] += len(code_of(path))
    assert all(tokens[folder] <= BUDGET[folder] for folder in BUDGET), tokens
    assert sum(tokens.values()) <= TOTAL, tokens


def test_code_is_not_squeezed():
    tokens = lines = long = pairs = conditional = walruses = 0
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        of_code = {token.start[0] for token in code_of(path)}
        tokens += len(code_of(path))
        lines += len(of_code)
        long += sum(
            len(line) > 100 for at, line in enumerate(source.splitlines(), 1) if at in of_code
        )
        for node in ast.walk(ast.parse(source)):
            conditional += isinstance(node, ast.IfExp)
            walruses += isinstance(node, ast.NamedExpr)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                pairs += isinstance(node.targets[0], ast.Tuple)
    thousands = lines / 1000
    assert tokens / lines <= MOST_TOKENS_PER_LINE
    assert long / lines <= MOST_LONG_LINES
    assert pairs / thousands <= MOST_PARALLEL_ASSIGNMENTS
    assert conditional / thousands <= MOST_CONDITIONAL_EXPRESSIONS
    assert walruses / thousands <= MOST_WALRUSES


def test_attention_can_be_read_in_one_sitting():
    path = PACKAGE / "models" / "attention.py"
    source = path.read_text(encoding="utf-8")
    assert len(code_of(path)) <= ATTENTION
    for question in (
        "is_scripting",
        "is_tracing",
        "is_compiling",
        "is_exporting",
        "is_grad_enabled",
        "is_cpu",
        "cuda",
    ):
        assert question not in source


def test_published_code_is_what_the_model_reaches_and_no_more():
    reached, waiting = set(), ["models.modeling_sa"]
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting += IMPORTS[module] - reached
    assert all(folder_of(module) == "models" for module in reached)
    paths = [PACKAGE / f"{name.replace('.', '/')}.py" for name in reached]
    sizes = {path.stem: len(code_of(path)) for path in paths}
    assert sum(sizes.values()) <= REMOTE_CODE, sizes


@pytest.mark.parametrize("path", [path for path in FILES if "." in module_of(path)], ids=module_of)
def test_only_the_interfaces_know_timm_and_transformers(path):
    timm = {"timm_models", "timm_network", "timm_backbones", "layer_conversion"}
    transformers = {"configuration_sa", "modeling_sa"}
    if path.parent.name in ("models", "kernels", "convolution"):
        text = path.read_text(encoding="utf-8")
        assert path.stem in timm or ("import timm" not in text and "from timm" not in text)
        assert path.stem in transformers or (
            "import transformers" not in text and "from transformers" not in text
        )


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
