"""python scripts/test_versions.py gpu lowest --python ~/.pyenv/versions/3.12.1/bin/python

Creates an environment per set of versions with uv, runs the test suite in it, and removes it. A set is what was newest
on a day, with some versions fixed, so that libraries meet the ones they were released with. A lower bound in
pyproject.toml has to be a version on which this passed.
"""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
# Name -> (day, "" for today; fixed versions, which may be newer)
SETS = {
    "newest": ("", []),
    # what GPU machines have
    "gpu": (
        "",
        ["torch==2.11.0", "torchvision==0.26.0", "transformers==5.17.0", "huggingface_hub==1.33.0"],
    ),
    # The lower bounds. transformers 5.0 to 5.2 lack transformers.backbone_utils, which modeling_sa.py needs. Only since
    # 1.0.31 does timm record a model's arguments and input size, with which a folder builds the same model again.
    "lowest": (
        "2026-04-01",
        ["torch==2.9.0", "torchvision==0.24.0", "timm==1.0.31", "transformers==5.4.0"],
    ),
}


def names(requirements: list[str]) -> list[str]:
    """Requirements without their versions; what refers to this package itself is left out."""
    bare = (requirement.partition(">")[0].partition("=")[0] for requirement in requirements)
    return [name for name in bare if not name.startswith("sa_zoo")]


def main(
    sets: Annotated[list[str], typer.Argument(help=f"Any of {', '.join(SETS)}.")],
    python: Annotated[str, typer.Option(help="Interpreter, or its version.")] = "3.11",
    tests: Annotated[list[str] | None, typer.Option(help="Test files; all by default.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which to keep the environments.")
    ] = None,
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [item for extra in project["optional-dependencies"].values() for item in extra]
    wanted = [
        *names(project["dependencies"] + extras),
        "setuptools",
        "pip",
    ]  # tests install this package
    failed = []
    for name in sets:
        day, fixed = SETS[name]
        with TemporaryDirectory() as folder:
            environment = (keep or Path(folder)) / name
            interpreter = str(environment / "bin" / "python")
            subprocess.run(
                ["uv", "venv", "--python", python, "--allow-existing", str(environment)], check=True
            )
            install = ["uv", "pip", "install", "--python", interpreter, *fixed, *wanted]
            limits = ["--exclude-newer", day]
            for package in names(fixed):
                limits += ["--exclude-newer-package", f"{package}=9999-01-01"]
            subprocess.run([*install, *(limits if day else [])], check=True)
            subprocess.run(["uv", "pip", "list", "--python", interpreter], check=True)
            # sources are used as they are; the compiled library lies beside them where it was built
            variables = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(tests or [])]
            if subprocess.run(command, cwd=ROOT, env=variables).returncode:
                failed.append(name)
    print("passed:", *(name for name in sets if name not in failed), "failed:", *failed)
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    if not shutil.which("uv"):
        raise SystemExit("uv is not installed: pip install uv")
    typer.run(main)
