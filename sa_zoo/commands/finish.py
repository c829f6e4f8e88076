"""From a trained network to a folder to publish: adds files for transformers and for people."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from sa_zoo.analysis.explorer import explorer_files
from sa_zoo.analysis.figures import figure_files
from sa_zoo.data.config import DataConfig
from sa_zoo.data.open_images import open_images
from sa_zoo.folders.check import refusing
from sa_zoo.folders.metrics import metrics_of, read_metrics, write_metrics
from sa_zoo.folders.parts import CHANGING, parts_of
from sa_zoo.folders.write import new_folder, write_sums, write_timm_files
from sa_zoo.opened import Opened, open_model
from sa_zoo.publishing.card import write_card
from sa_zoo.publishing.timm_checkpoint import copy_model, network_from_checkpoint
from sa_zoo.publishing.transformers_export import transformers_files

_logger = logging.getLogger(__name__)


def finish(opened: Opened) -> Opened:
    """Complete a folder that timm loads: transformers' files, figures, explorer, manifest, a card if it has none."""
    folder = opened.local_folder
    with refusing(opened.source):
        opened = opened.with_files(transformers_files(opened))
        opened = opened.with_files(figure_files(opened))
        opened = opened.with_files(explorer_files(opened))
        if not (folder / "README.md").is_file():  # it may have been edited
            write_card(opened)  # last, as it shows the others
    for path in folder.rglob(".*.incomplete"):
        if path.is_file():  # left by a killed process
            path.unlink()
    write_sums(folder, sorted({*parts_of(folder)} - CHANGING))
    return opened


def finish_copy(source: str | Path, out: str | Path, model: str = "", classes: str = "") -> Opened:
    """Make a complete folder `out` from another trainer's files, as `sa-zoo finish` does.

        mine = sa_zoo.finish("model_best.pth.tar", "mine", classes="data/images")
        sa_zoo.publish(mine, "you/mine")

    Args:
        source: a model folder of transformers' Trainer or timm's `save_for_hf`, or a checkpoint of timm's trainer or
            of the paper's own code.
        model: the timm name, if missing in the checkpoint.
        classes: names of the classes: a data set, or a file with a line for each.

    Raises:
        FileExistsError: if `out` is not empty.
        FileNotFoundError, ValueError: if the source cannot be read or the classes do not fit.
    """
    source = Path(source)
    out = Path(out)
    if not source.exists():
        raise FileNotFoundError(f"checkpoint: got {source}, which is not there")
    names = _names_from(classes)
    with new_folder(out) as new:
        if source.is_file():
            network, data = network_from_checkpoint(source, model)
            write_timm_files(new, network, data_config=data)
        else:
            copy_model(source, new)
        opened = _with_names(open_model(new), names)
        held_out = read_metrics(source).held_out  # of a run; its other results are of other weights
        metrics = write_metrics(new, metrics_of(opened.network, held_out=held_out))
        opened = finish(replace(opened, metrics=metrics))
    return opened.moved(out)


def _names_from(source: str) -> list[str]:
    """The lines of a file, or the classes of a data set (of a folder: in timm's natural order)."""
    if Path(source).is_file():
        return Path(source).read_text(encoding="utf-8-sig").splitlines()
    return list(open_images(DataConfig(name=source)).classes) if source else []


def _with_names(opened: Opened, names: list[str]) -> Opened:
    """The model with these names of its classes; warn if it has none. Raises ValueError for a wrong number of names."""
    cfg: Any = opened.network.pretrained_cfg
    classes = opened.network.num_classes
    if names:
        if len(names) != classes:
            raise ValueError(f"--classes: got {len(names)} names, expected {classes}")
        cfg["label_names"] = names
        named = {
            "label_names": names,
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
        }
        return opened.with_files({"config.json": json.dumps(opened.config | named).encode()})
    if len(cfg.get("label_names") or ()) != classes:
        _logger.warning(
            "the model has no names for its %d classes, so evaluation matches them by number, in timm's natural "
            "order of folders; --classes FOLDER stores them",
            classes,
        )
    return opened
