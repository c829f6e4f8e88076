"""A report of a data set, with every image decoded."""

from sa_zoo.data.report import Report, report_of
from sa_zoo.data.sources import open_source
from sa_zoo.training.config import data_config
from sa_zoo.training.splits import rows_of


def data_report(name: str, overrides: list[str]) -> Report:
    """The report of a data set; `overrides` are those of a recipe. Raises ValueError for data without labels."""
    config = data_config(name, overrides)
    source = open_source(config)
    rows = rows_of(source, config.validation, config.hold_out)
    return report_of(source, rows, decode=True)
