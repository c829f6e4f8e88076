"""A run from its config to the folder that is published: training, then what transformers and people read."""

from pathlib import Path

from accelerate import PartialState

from sa_zoo.analysis.figures import draw_figures
from sa_zoo.folders.check import checked
from sa_zoo.folders.metrics import Metrics
from sa_zoo.folders.opened import open_model
from sa_zoo.folders.write import SUMS, check_sums, write_sums
from sa_zoo.interchange.transformers_export import export_for_transformers
from sa_zoo.publishing.card import write_card
from sa_zoo.training.config import Config
from sa_zoo.training.train import train
from sa_zoo.verbs.explore import write_explorer


def fit(config: Config, out: Path, resume: bool = False) -> Metrics:
    """Train, evaluate and leave a complete run folder, as `sa-zoo train` does; raises what `train` raises."""
    metrics = train(config, out, resume).metrics
    if PartialState().is_main_process:
        finish_folder(out)
    return metrics


def finish_folder(folder: Path, name: str = "") -> None:
    """Add to a folder that timm loads what transformers needs, its figures, explorer and card, and a manifest.

    `name` is the folder's own once it is complete, if that is another one now.
    Raises ValueError if the folder has a manifest already and a file is not as it says. The card and metrics.json are
    not in it: they may be written again. A folder of model_cards has check.json instead, as its code is linked.
    """
    check_sums(folder)
    with checked(f"local-dir:{folder}"):
        export_for_transformers(folder)
        opened = open_model(str(folder))
        draw_figures(opened)
        write_explorer(opened, name or folder.resolve().name)
        write_card(folder)
    for leftover in filter(
        Path.is_file, folder.rglob(".*.incomplete")
    ):  # of a process that was killed while it wrote
        leftover.unlink()
    if (folder / "check.json").is_file():
        return
    files = (
        path for pattern in ("*", "figures/*") for path in folder.glob(pattern) if path.is_file()
    )
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    write_sums(folder, [name for name in names if name not in ("README.md", "metrics.json", SUMS)])
