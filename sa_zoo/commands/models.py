"""The trained models of the package, or of a clone of the repository."""

from sa_zoo.folders.metrics import read_metrics
from sa_zoo.models.timm_models import HUB_OWNER, WEIGHTS


def models_table() -> str:
    """One line per trained model with test results, the most accurate first, and how to load one."""
    rows = []
    for folder in WEIGHTS.iterdir():
        metrics = read_metrics(folder)  # empty for a file
        if metrics.test:
            row = f"{folder.name:32}{metrics.parameters or 0:12,}{metrics.test.percent:>17}"
            rows.append((metrics.test.top1, f"{row}  {_location(folder.name)}"))
    return "\n".join(
        [
            f"{'model':32}{'parameters':>12}{'top-1':>9}          weights",
            *(row for _, row in sorted(rows, reverse=True)),
            "load one: timm.create_model(NAME, pretrained=True) after import sa_zoo",
        ]
    )


def _location(name: str) -> str:
    """The location of the weights of a model."""
    if (WEIGHTS / name / "model.safetensors").is_file():
        return "on this machine"
    if HUB_OWNER:
        return f"hf-hub:{HUB_OWNER}/{name}"
    return "in a clone of the repository"
