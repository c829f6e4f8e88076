"""A report of a data set, with every image decoded."""

from sa_zoo.data.hold_out import rows_of
from sa_zoo.data.open_images import open_images
from sa_zoo.data.report import Report, report_of
from sa_zoo.training.config import data_config


def data_report(name: str, overrides: list[str]) -> Report:
    """The report of a data set; `overrides` are those of a recipe. Raises ValueError for data without labels."""
    config = data_config(name, overrides)
    data = open_images(config)
    return report_of(data, rows_of(data, config.validation), decode=True)
