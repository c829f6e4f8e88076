import tomllib
from pathlib import Path

import pytest
import timm

import sa_zoo  # noqa: F401  registers its names with timm
from sa_zoo.training.config import dump_config, load_config, parse_config

MINIMAL = {"model": {"name": "test_vit"}, "train": {"epochs": 2}}
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "test_vit"\n[train]\nepochs = 2\n')
    return path


@pytest.mark.parametrize(
    ("dotted", "value", "said"),
    [
        ("train.epoch", 3, "train.epoch: got an unknown key, .*did you mean train.epochs?"),
        ("train.epochs", "3", "train.epochs: got '3', expected a valid integer"),
        ("data.validation", 1.5, "data.validation: got 1.5, expected less than 1"),
        ("optim.lr", float("nan"), "optim.lr: got nan, expected"),
        ("train.precision", "bf61", "train.precision: got 'bf61', .*'fp16'.*mean bf16?"),
        ("augment.hflip", 0.5, r"augment.hflip: got 0.5 with augment.scale = \[\], expected"),
        ("augment.half_epochs", 1, "augment.half_epochs: got 1, expected at most augment.small"),
        ("augment.scale", [1.0, 0.3], r"augment.scale: got \[1.0, 0.3\], expected two numbers"),
        ("model.args", {"num_classes": 7}, "model.args.num_classes: got 7, .*the data set"),
        ("train.seed", 2**63, "train.seed: got 9223372036854775808, expected less than"),
        ("model.freeze", "(", r"model.freeze: got '\(', expected a regular expression"),
    ],
)
def test_a_mistake_names_key_value_expectation_and_nearest_name(dotted, value, said):
    section, key = dotted.split(".")
    table = {**MINIMAL, section: {**MINIMAL.get(section, {}), key: value}}
    with pytest.raises(ValueError, match=f"^{said}") as caught:
        parse_config(table)
    assert "\n" not in str(caught.value)


def test_overrides_apply_in_order_and_are_toml_or_else_text(path):
    overrides = [
        "train.epochs=3",
        "train.epochs=5",
        "model.args.depth=7",
        "model.freeze=a=b",
        "augment.flip=true",
    ]
    config = load_config(path, overrides)
    assert config.augment.flip is True and config.model.args == {"depth": 7}
    assert (config.train.epochs, config.model.freeze) == (5, "a=b")
    assert load_config(path, "train.epochs=7").train.epochs == 7


def test_the_written_config_reads_back_equal():
    args = {"a b": [1, -0.5, True, [], 'é\n"'], "": {"x": {"y": 2**60}}, "t": 1e-12}
    config = parse_config({**MINIMAL, "model": {"name": "test_vit", "args": args}})
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_project_configs_are_valid(path):
    assert timm.is_model(load_config(path).model.name)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epochs", "expected key=value"),
        ("train..epochs=3", "expected key=value"),
        ("train.epochs.more=3", "train.epochs: got {'more': 3}, expected a valid integer"),
        (3, "got 3, expected text such as"),
        ("lr=3", r"did you mean optim.lr\?"),
    ],
)
def test_a_mistaken_override_is_reported(path, override, said):
    with pytest.raises(ValueError, match=said):
        load_config(path, [override])


def test_a_missing_file_names_the_nearest_a_bad_one_its_place(path):
    with pytest.raises(FileNotFoundError, match=r", quickstart, .*did you mean run.toml\?"):
        load_config(path.with_name("runs.toml"))
    path.write_text("[model\n")
    with pytest.raises(ValueError, match=r"expected TOML: .*line 1"):
        load_config(path)
