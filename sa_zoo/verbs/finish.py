"""From a trained network to the folder that is published: what transformers and people read is added."""

from collections.abc import Callable
from pathlib import Path

from sa_zoo.analysis.figures import figure_files
from sa_zoo.folders.check import refusing
from sa_zoo.folders.metrics import Metrics, write_metrics
from sa_zoo.folders.opened import Opened, open_folder
from sa_zoo.folders.write import SUMS, new_folder, write_sums, write_timm_files
from sa_zoo.interchange.timm_checkpoint import PICKLED, network_from_checkpoint, write_safely
from sa_zoo.interchange.transformers_export import transformers_files
from sa_zoo.publishing.card import card_files
from sa_zoo.verbs.explore import explorer_files

CHANGING = {
    "README.md",
    "metrics.json",
    SUMS,
}  # may be written again, so the manifest leaves them out


# What a finished folder has besides the files of training or conversion. A card shows the files before it.
PARTS: tuple[Callable[[Opened], dict[str, bytes]], ...] = (
    transformers_files,  # preprocessor_config.json, *.py, config.json
    figure_files,  # figures/*.png
    explorer_files,  # explorer.html
    card_files,  # README.md
)


def finish(opened: Opened) -> Opened:
    """Complete a folder that timm loads: transformers' files, figures, explorer, card, manifest."""
    folder = opened.local_folder
    with refusing(opened.source):
        for files_of in PARTS:
            opened = opened.with_files(files_of(opened))
    for path in folder.rglob(".*.incomplete"):
        if path.is_file():  # of a process that was killed while it wrote
            path.unlink()
    paths = [*folder.glob("*"), *folder.glob("figures/*")]
    names = {path.relative_to(folder).as_posix() for path in paths if path.is_file()}
    write_sums(folder, sorted(names - CHANGING))
    return opened


def finish_folder(folder: Path) -> Opened:
    """Open a model folder and `finish` it; raises what `open_folder` raises."""
    return finish(open_folder(folder))


def finish_copy(source: Path, out: Path, model: str = "") -> Opened:
    """Make a complete folder `out` of what another trainer left; returns it as opened.

    `source` is a model folder, as transformers' Trainer and timm's `save_for_hf` write it, or a checkpoint of timm's
    trainer or of the paper's own code; `model` is the timm name of a checkpoint that does not have it. Raises
    FileExistsError if `out` is not empty, FileNotFoundError or ValueError for a source that cannot be read.
    """
    with new_folder(out) as new:
        if source.is_file():
            network, data = network_from_checkpoint(source, model)
            write_timm_files(new, network, data_config=data)
        else:
            if (source / PICKLED).is_file() and not (source / "model.safetensors").is_file():
                write_safely(source, new)
                source = new
            network = open_folder(source).network
            write_timm_files(new, network)
        metrics = Metrics(
            model=network.pretrained_cfg["architecture"],  # type: ignore[index]
            parameters=sum(parameter.numel() for parameter in network.parameters()),
        )
        write_metrics(new, metrics)
        opened = finish_folder(new)
    return opened.moved(out)
