"""From a trained CNN to a complete folder of an attention network."""

from dataclasses import replace
from pathlib import Path

from sa_zoo.convolution.network_conversion import NetworkReport
from sa_zoo.folders.metrics import Baseline, write_test
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import new_folder
from sa_zoo.interchange.converted_cnn import write_converted
from sa_zoo.publishing.card import write_card
from sa_zoo.training.config import DataConfig, data_of
from sa_zoo.training.evaluate import evaluate_opened
from sa_zoo.verbs.finish import finish_folder


def convert_model(
    source: str,
    out: Path,
    layers: str = "*",
    alpha: float = 46.0,
    content: bool = False,
    data: str = "",
) -> tuple[Opened, NetworkReport]:
    """Turn the convolutions of a trained CNN into attention, in a complete folder `out`.

    With `data`, the test accuracy before and after goes into metrics.json and the card; if that fails, the folder
    stays. Raises FileExistsError if `out` is not empty, and what `open_model` and `write_converted` raise.
    """
    with new_folder(out) as new:
        cnn = open_model(source)
        report = write_converted(cnn, new, layers, alpha, content)
        converted = finish_folder(new)
    converted = converted.moved(out)
    if data:
        converted = _compared(cnn, converted, data)
    return converted, report


def conversion_report(converted: Opened, report: NetworkReport) -> str:
    """The report of a conversion, with the test accuracy before and after if it was measured."""
    text = report.table()
    before = converted.metrics.baseline
    after = converted.metrics.test
    if before and after:
        text += f"test accuracy {before.test} before, {after} after\n"
    return text.rstrip()


def _compared(cnn: Opened, converted: Opened, data: str) -> Opened:
    """Measure both networks, and put the results into the folder of the converted one."""
    try:
        config = _test_data(cnn, data)
        before = evaluate_opened(cnn, config).test
        # on the same images: the converted network was trained on the data of the CNN, too
        after = evaluate_opened(replace(cnn, network=converted.network), config)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; the conversion is in {converted.folder}") from error
    assert before
    baseline = Baseline(model=cnn.config.get("architecture", cnn.source), test=before)
    metrics = write_test(converted.local_folder, after, baseline=baseline)
    measured = replace(converted, metrics=metrics)
    write_card(measured)
    return measured


def _test_data(cnn: Opened, data: str) -> DataConfig:
    """The data set of this name as the run of the CNN describes it, with its title, or just by its name."""
    if cnn.folder and (cnn.folder / "train.toml").is_file():
        trained_on = data_of(str(cnn.folder))
        if trained_on.name == data:
            return trained_on
    return DataConfig(name=data)
