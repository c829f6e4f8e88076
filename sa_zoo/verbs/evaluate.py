"""The accuracy of any model on the test split of a data set."""

from sa_zoo.folders.metrics import Metrics
from sa_zoo.folders.opened import folder_of, open_model
from sa_zoo.training.config import DataConfig, data_of
from sa_zoo.training.evaluate import evaluate_opened


def evaluate(
    model: str, data: str = "", revision: str = "", label_column: str = "", detail: bool = False
) -> Metrics:
    """Evaluate a model, as `open_model` takes it, on a data set; without `data`, on that of its run.

    Raises ValueError for data that do not fit the model, and what `open_model` raises.
    """
    folder = folder_of(model)
    config = DataConfig(name=data) if data else data_of(str(folder or model))
    changes = {
        "revision": revision or config.revision,
        "label_column": label_column or config.label_column,
    }
    return evaluate_opened(open_model(model), config.model_copy(update=changes), detail)
