"""What a release publishes: the distributions are complete, and what is installed from the wheel works on its own."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import hub_server
import numpy as np
import pytest
import yaml
from programs import without_network

import sa_zoo

ROOT = Path(__file__).parents[1]
BUILT_FROM = (
    "sa_zoo configs model_cards results MANIFEST.in pyproject.toml setup.py README.md LICENSE"
)
SMOKE = """
import json, sys
from pathlib import Path
import timm, torch, sa_zoo
assert Path(sa_zoo.__file__).is_relative_to(sys.argv[1])
images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
names = timm.list_models(module="timm_models", pretrained=True)
with torch.inference_mode():
    print(json.dumps({n: timm.create_model(n, pretrained=True).eval()(images).tolist() for n in names}))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with what `python -m build` makes of a clone."""
    clone = tmp_path_factory.mktemp("clone")
    for name in BUILT_FROM.split():
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, clone / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(clone / "dist")]
    subprocess.run(build, cwd=clone, check=True, capture_output=True)
    return clone / "dist"


def test_what_is_installed_works_away_from_the_clone(dist, tmp_path):
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
    files = list((installed / "sa_zoo" / "weights").glob("*/*"))
    assert {path.name for path in files} == {"model.safetensors", "metrics.json"}
    assert sum(path.stat().st_size for path in files) <= 16e6
    logits = json.loads(run("-c", SMOKE, str(installed)))
    assert logits.keys() == {path.parent.name for path in files if path.suffix != ".json"}
    for name, found in logits.items():
        stored = json.loads((ROOT / "model_cards" / name / "check.json").read_text())["logits"]
        assert np.allclose(found, stored, rtol=1e-4, atol=1e-4)
    assert (installed / "sa_zoo" / "publishing" / "card.md.jinja").is_file()
    assert (installed / "sa_zoo" / "analysis" / "explorer_page").is_dir()
    recipes = {path.name for path in (installed / "sa_zoo" / "recipes").iterdir()}
    assert recipes == {path.name for path in (ROOT / "configs").glob("*.toml")}


HUB_ROUTES = {
    "GET /id-token": lambda *_: {"value": "of this workflow"},
    "POST /oauth/token": lambda handler, request: granted(handler, *request),
}


def granted(handler, request):
    """A token for one repository, in exchange for that of the workflow."""
    wanted = ("of this workflow", "you/sa_quadratic_tiny_cifar")
    if (request["subject_token"], request["resource"]) != wanted:
        raise hub_server.Problem(401)
    return {"access_token": hub_server.TOKEN, "expires_in": 3600}


def test_the_release_publishes_a_model_without_a_stored_token(tmp_path, monkeypatch):
    """The last command of the workflow, in an environment as that of GitHub's."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    command = workflow["jobs"]["hub"]["steps"][-1]["run"]
    monkeypatch.setattr(hub_server, "ROUTES", hub_server.ROUTES | HUB_ROUTES)
    with hub_server.HubServer() as hub:
        hub.repositories["you/sa_quadratic_tiny_cifar"] = hub_server.Repository()
        hub.repositories["you/sa_quadratic_tiny_cifar"].commit({}, "initial commit")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "HF_ENDPOINT": hub.url,
            "GITHUB_ACTIONS": "true",
            "GITHUB_REF_NAME": "v1",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{hub.url}/id-token",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of GitHub",
            "MODEL": "sa_quadratic_tiny_cifar",
            "OWNER": "you",
            "HF_OIDC_RESOURCE": "you/sa_quadratic_tiny_cifar",
        }
        subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
        published = hub.repositories["you/sa_quadratic_tiny_cifar"]
    assert published.tags == {"v1": published.head}
    assert {"README.md", "model.safetensors"} <= published.commits[published.head].keys()
