"""python scripts/gpu_bundle.py DIR --have LIST --data FOLDER [--python 3.12]

Collects in DIR what a machine without a network connection needs for gpu_day.py: the sources at the last commit, the
data, and wheels of what that machine lacks. LIST is a file: what `pip list --format=freeze` prints there.
There, `sh DIR/run.sh --minutes 40` runs the day.
"""

import json
import shutil
import subprocess
import sys
import tomllib
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from zipfile import ZipFile

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sa_zoo.folders.write import new_folder

ROOT = Path(__file__).parents[1]
LEFT_OUT = (":!model_cards", ":!tests", ":!docs/figures")  # not needed, and large
# A wheel fits if one of its names is here; for glibc 2.28 and newer
PLATFORMS = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
PLATFORMS += [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)]
RUN = """#!/bin/sh
# Installs the wheels next to this file, once, and runs the day: sh run.sh --minutes 40
set -e
cd "$(dirname "$0")"
if [ ! -d site ]; then
    rm -rf installing
    python3 -m pip install --quiet --no-index --no-deps --target installing wheels/*.whl
    mv installing site
fi
PYTHONPATH="$PWD/sources:$PWD/site" exec python3 sources/scripts/gpu_day.py --out day --data data "$@"
"""


def installed(text: str) -> dict[str, Version]:
    """Version by name, from lines NAME==VERSION; other lines are left out."""
    pairs = [line.split("==") for line in text.splitlines() if line.count("==") == 1]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def pip(command: str, python: str, *arguments: str) -> None:
    """Run a command of pip for another machine: a version of Python on Linux, wheels only."""
    target = ["--quiet", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([sys.executable, "-m", "pip", command, *target, *arguments], check=True)


def missing(have: dict[str, Version], python: str) -> list[str]:
    """What has to be added for the dependencies of this package, as NAME==VERSION; the rest stays as it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kept = dict(have)
    needed = []
    for requirement in map(Requirement, project["dependencies"]):
        name = canonicalize_name(requirement.name)
        if name not in have or have[name] not in requirement.specifier:
            kept.pop(name, None)
            needed.append(str(requirement))
    if not needed:
        return []
    with TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={v.public}\n" for name, v in kept.items()))
        found = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", f"--target={folder}", f"--report={found}"]
        pip("install", python, *options, f"--constraint={constraints}", *needed)
        resolved = json.loads(found.read_text(encoding="utf-8"))["install"]
    chosen = [(each["metadata"]["name"], each["metadata"]["version"]) for each in resolved]
    return [f"{name}=={v}" for name, v in chosen if canonicalize_name(name) not in kept]


def main(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    have: Annotated[Path, typer.Option(help="Output of `pip list --format=freeze` there.")],
    data: Annotated[Path, typer.Option(help="Folder of CIFAR-10.")],
    python: Annotated[str, typer.Option(help="Version of Python there.")] = "3.12",
) -> None:
    archive = ["git", "archive", "--format=zip", "HEAD", "--", ".", *LEFT_OUT]
    sources = subprocess.run(archive, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with new_folder(out) as new:
        with ZipFile(BytesIO(sources)) as archived:
            archived.extractall(new / "sources")
        shutil.copytree(data, new / "data")
        wheels = missing(installed(have.read_text(encoding="utf-8")), python)
        (new / "wheels").mkdir()
        if wheels:
            pip("download", python, "--no-deps", f"--dest={new / 'wheels'}", *wheels)
        (new / "run.sh").write_text(RUN)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{out}: {size / 2**20:.0f} MiB, with {', '.join(wheels) or 'no wheels'}")


if __name__ == "__main__":
    typer.run(main)
