"""What pyproject.toml cannot state: recipes and weights outside the package's folder."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup


def installed_weights() -> list[str]:
    """Folders in model_cards/ whose weights an installation has: 16 MB at most."""
    table = tomllib.loads(Path("results/runs.toml").read_text(encoding="utf-8"))
    return [run["name"] for run in table["run"] if run.get("weights") == "installed"]


setup(
    # configs/ and model_cards/ are the one place of recipes and weights; an installation has them in sa_zoo
    packages=[*find_packages(include=["sa_zoo*"]), "sa_zoo.recipes", "sa_zoo.weights"],
    package_dir={"sa_zoo.recipes": "configs", "sa_zoo.weights": "model_cards"},
    package_data={
        "sa_zoo": ["publishing/*.jinja", "analysis/explorer_page/*"],
        "sa_zoo.recipes": ["*.toml"],
        "sa_zoo.weights": [
            "*/metrics.json",
            *(f"{name}/model.safetensors" for name in installed_weights()),
        ],
    },
)
