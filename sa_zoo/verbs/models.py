"""The trained models of the package and of the clone that it may be installed from."""

from sa_zoo.folders.metrics import Metrics, margin, read_metrics
from sa_zoo.models.timm_models import HUB_OWNER, WEIGHTS


def trained_models() -> dict[str, Metrics]:
    """The metrics of all models that were evaluated on test images, by name, the most accurate first."""
    found = {folder.name: read_metrics(folder) for folder in WEIGHTS.iterdir() if folder.is_dir()}
    tested = {name: metrics for name, metrics in found.items() if metrics.test}
    return dict(sorted(tested.items(), key=lambda item: -item[1].measured()["test"]["top1"]))


def table() -> str:
    """One line per trained model, and how to load one."""
    lines = [f"{'model':32}{'parameters':>12}{'top-1':>9}          weights"]
    for name, metrics in trained_models().items():
        assert metrics.test
        top1 = metrics.test.top1
        accuracy = f"{top1:9.2%} ± {margin(top1, metrics.test.n):.2%}"
        lines.append(f"{name:32}{metrics.parameters or 0:12,}{accuracy}  {_location(name)}")
    lines.append("load one: timm.create_model(NAME, pretrained=True) after import sa_zoo")
    return "\n".join(lines)


def _location(name: str) -> str:
    """Where the weights of a model are."""
    if (WEIGHTS / name / "model.safetensors").is_file():
        return "on this machine"
    if HUB_OWNER:
        return f"hf-hub:{HUB_OWNER}/{name}"
    return "in a clone of the repository"
