"""The accuracy of any model on the test split of a data set."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sa_zoo.data.config import DataConfig
from sa_zoo.folders.metrics import Metrics
from sa_zoo.opened import Opened, folder_of, open_model
from sa_zoo.training.config import data_config, data_of
from sa_zoo.training.evaluate import evaluate_opened


def evaluate(
    model: str | Path | Opened,
    data: str | Path = "",
    changes: str | Iterable[str] = (),
    detail: bool = False,
) -> Metrics:
    """Evaluate a model on the test split of a data set, by default that of its run, as `sa-zoo evaluate` does.

        sa_zoo.evaluate("runs/mine").test.top1
        run = sa_zoo.open("runs/mine")
        sa_zoo.harden(run.network)
        sa_zoo.evaluate(run, "data/images", ["data.image_size=48"]).test.top1

    Args:
        model: an argument or a result of `sa_zoo.open`.
        data: Hub data set, folder or "digits".
        changes: values of a recipe to replace, "data.key=value".
        detail: add accuracy by class and the confusion matrix.

    Raises:
        ValueError: for data that do not fit the model; and the errors of `sa_zoo.open`.
    """
    config = data_for(model, data, changes)
    return evaluate_opened(open_model(model), config, detail)


def data_for(
    model: str | Path | Opened, data: str | Path, changes: str | Iterable[str] = ()
) -> DataConfig:
    """The data set `data`, configured as in the model's run if the names agree; if empty, the data of the run.

    Raises ValueError if there is neither.
    """
    name = model.source if isinstance(model, Opened) else model
    run = folder_of(model) or name
    data = str(data)
    if not data:
        return data_of(run, changes)
    with suppress(ValueError):  # not a run folder
        if data_of(run).name == data:
            return data_of(run, changes)
    return data_config(data, changes)
