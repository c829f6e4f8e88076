"""results/runs.toml, the table of all runs, and where model_cards/ has their results."""

import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

from sa_zoo.folders.metrics import Metrics, read_results

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "runs.toml"
MODEL_CARDS = ROOT / "model_cards"
# glibc keeps the memory of a step for the next one instead of returning it to the system.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


@dataclass(frozen=True)
class Row:
    """A row; results/runs.toml says what its keys mean."""

    name: str
    command: str = "train tiny"
    set: str = ""
    seeds: int = 1
    after: str = ""
    says: str = ""
    table: str = "results"
    data: str = ""
    weights: str = ""
    baseline: str = ""
    gpu: bool = False

    @property
    def model(self) -> str:
        return self.name.partition(".")[0]

    @property
    def recipe(self) -> str:
        """Name of the recipe within the folder of the model; empty if it is that of the folder's own weights."""
        return "" if self.weights else self.name.partition(".")[2]

    @property
    def folder(self) -> Path:
        return MODEL_CARDS / (self.name if self.weights else self.model)

    def arguments(self, seed: int, data: str, title: str) -> list[str]:
        """Arguments of `sa-zoo` for a run in the folder NAME-SEED of the working directory."""
        words = [*shlex.split(self.command), "--out", f"{self.name}-{seed}"]
        if self.data:
            data, title = f"data/{self.data}", self.data
        values = [f"model.name={self.model}", f"data.name={data}", f"data.title={title}"]
        values += self.set.replace("SEED", str(seed)).split()
        for value in (*values, f"train.seed={seed}", "train.checkpoint_steps=200"):
            words += ["--set", value]
        return words

    def results(self) -> list[Metrics]:
        """Metrics of the runs that are finished."""
        return [run for run in read_results(self.folder).get(self.recipe, []) if run.test]


def read_runs() -> list[Row]:
    content = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    rows = []
    for row in content["run"]:
        settings = row.get("set", "").format(**content["short"])
        rows.append(Row(**row | {"set": settings}))
    return rows
