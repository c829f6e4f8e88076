"""What a release publishes: the distributions are complete, and what is installed from the wheel works on its own."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from programs import without_network

import sa_zoo

ROOT = Path(__file__).parents[1]
BUILT_FROM = (
    "sa_zoo",
    "configs",
    "model_cards",
    "results",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
SMOKE = """
import sys
from pathlib import Path
import timm, torch, sa_zoo
assert Path(sa_zoo.__file__).is_relative_to(sys.argv[1])
for name in timm.list_models("*_cifar*", pretrained=True):
    model = timm.create_model(name, pretrained=True).eval()
    print(name, tuple(model(torch.zeros(2, 3, 32, 32)).shape))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with what `python -m build` makes of a clone."""
    clone = tmp_path_factory.mktemp("clone")
    for name in BUILT_FROM:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, clone / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(clone / "dist")]
    subprocess.run(build, cwd=clone, check=True, capture_output=True)
    return clone / "dist"


def test_the_distributions_pass_the_checks_of_pypi_and_have_the_version_of_the_package(dist):
    names = sorted(path.name for path in dist.iterdir())
    assert [name.split("-")[:2] for name in names] == [["sa_zoo", sa_zoo.__version__],
                                                       ["sa_zoo", f"{sa_zoo.__version__}.tar.gz"]]  # fmt: skip
    check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    subprocess.run(check, check=True, capture_output=True)


def test_the_source_distribution_has_all_that_the_wheel_is_built_from(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ["sa_zoo/publishing/card.md.jinja", "LICENSE"]
    needed += [str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("*.toml")]
    assert names.issuperset(needed)
    assert not {name for name in names if name.endswith((".html", ".png", ".jsonl"))}


def test_what_is_installed_from_the_wheel_works_away_from_the_clone(dist, tmp_path):
    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = without_network(sys.executable, *arguments)
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-m", "sa_zoo", "--version").strip() == sa_zoo.__version__
    shapes = run("-c", SMOKE, str(installed)).splitlines()
    assert "sa_quadratic_tiny_cifar.long (2, 10)" in shapes and len(shapes) >= 3


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_are_valid(name):
    workflow = ROOT / ".github" / "workflows" / f"{name}.yml"
    schema = ["--builtin-schema", "vendor.github-workflows", str(workflow)]
    subprocess.run([sys.executable, "-m", "check_jsonschema", *schema], check=True)
