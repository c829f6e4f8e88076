"""The trained models of the package and of the clone that it may be installed from."""

from sa_zoo.folders.metrics import margin, read_metrics
from sa_zoo.models.timm_models import HUB_OWNER, WEIGHTS


def models_table() -> str:
    """A line per trained model that was evaluated on test images, the most accurate first, and how to load one."""
    found = [(folder.name, read_metrics(folder)) for folder in WEIGHTS.iterdir() if folder.is_dir()]
    rows = [
        (run.test.top1, run.test.n, name, run.parameters or 0) for name, run in found if run.test
    ]
    lines = [f"{'model':32}{'parameters':>12}{'top-1':>9}          weights"]
    for top1, n, name, parameters in sorted(rows, reverse=True):
        accuracy = f"{top1:9.2%} ± {margin(top1, n):.2%}"
        lines.append(f"{name:32}{parameters:12,}{accuracy}  {_location(name)}")
    lines.append("load one: timm.create_model(NAME, pretrained=True) after import sa_zoo")
    return "\n".join(lines)


def _location(name: str) -> str:
    """Where the weights of a model are."""
    if (WEIGHTS / name / "model.safetensors").is_file():
        return "on this machine"
    if HUB_OWNER:
        return f"hf-hub:{HUB_OWNER}/{name}"
    return "in a clone of the repository"
