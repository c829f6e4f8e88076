"""scripts/reproduce.py: its rows are valid, and its queue can be stopped at any time."""

import importlib.util
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch
from datasets import Dataset
from PIL import Image
from tiny_runs import signalled_by

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.cost import training_macs
from sa_zoo.folders.metrics import read_metrics
from sa_zoo.training.config import Config, load_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "reproduce.py"
SMALL = (
    "data.name=digits data.title=digits train.epochs=5 train.batch_size=200 data.image_size=8 "
    "model.args.embed_dim=16 model.args.depth=1 model.args.patch_size=2"
)


@pytest.fixture
def reproduce(monkeypatch):
    spec = importlib.util.spec_from_file_location("reproduce", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reproduce", module)
    spec.loader.exec_module(module)
    before = signal.getsignal(signal.SIGTERM)
    yield module
    signal.signal(signal.SIGTERM, before)


def pflop(config: Config) -> float:
    with torch.device("meta"):
        model = timm.create_model(config.model.name)
    small = config.augment.small_epochs
    macs = (config.train.epochs - small) * training_macs(model, (3, 32, 32))
    macs += small * training_macs(model, (3, 24, 24)) if small else 0
    return 6 * macs * 45_000 / 1e15


def test_each_row_trains_the_model_of_its_name_by_a_valid_config(reproduce):
    for row in reproduce.ROWS:
        command = reproduce.command_of(row, 7, "data/cifar10", "some images")
        assert command[command.index("--out") + 1] == f"{row.name}-7"
        if command[0] == "train":
            config = load_config(
                command[1], [value for key, value in pairwise(command) if key == "--set"]
            )
            assert config.train.seed == 7
            assert config.model.name == row.name.partition(".")[0]


def test_digits_are_gray_images_by_split_and_class(reproduce, tmp_path):
    reproduce.write_digits(tmp_path, n=1000)
    pictures, found = list(tmp_path.rglob("*.png")), set()
    assert len(pictures) == 1797 and len(list((tmp_path / "train").rglob("*.png"))) == 1000
    for picture in pictures:
        with Image.open(picture) as image:
            found.add((picture.parent.name, image.mode))
    assert found == {(str(digit), "L") for digit in range(10)}


def test_a_tenth_has_every_test_image_and_drawn_training_images(reproduce, tmp_path):
    images = [{"bytes": bytes([index]), "path": None} for index in range(53)]
    (tmp_path / "whole").mkdir()
    for split, count in (("train", 53), ("test", 7)):
        columns = {"img": images[:count], "label": list(range(count))}
        Dataset.from_dict(columns).to_parquet(tmp_path / "whole" / f"{split}.parquet")
    reproduce.write_tenth(str(tmp_path / "whole"), tmp_path / "tenth")
    found = {
        split: Dataset.from_parquet(str(tmp_path / "tenth" / f"{split}.parquet"))
        for split in ("train", "test")
    }
    assert found["test"]["label"] == list(range(7))
    drawn = found["train"]["label"]
    assert len(drawn) == 5 and sorted(set(drawn)) == drawn and drawn != list(range(5))
    assert [image["bytes"] for image in found["train"]["img"]] == [bytes([n]) for n in drawn]


def test_a_tenth_of_the_images_takes_a_third_of_the_steps(reproduce):
    epochs = {}
    for row in reproduce.ROWS:
        if row.name.endswith(("_all", "_tenth")):
            config = load_config("tiny", row.settings.split())
            assert config.data.name == (
                reproduce.TENTH if row.name.endswith("_tenth") else "uoft-cs/cifar10"
            )
            epochs.setdefault(row.name.rpartition("_")[2], set()).add(config.train.epochs)
    (every,), (tenth,) = epochs["all"], epochs["tenth"]
    assert 3 * tenth == 10 * every


def test_rows_that_are_compared_have_equal_work(reproduce):
    work = {}
    for row in reproduce.ROWS:
        if row.command == "train tiny" and "." not in row.name:
            work[row.name] = pflop(load_config("tiny", row.settings.split()))
    reference = work["resnet_tiny_cifar"]
    compared = ("pyramid", "pyramid_h5", "quadratic", "quadratic_kernel", "learned")
    for name in compared:
        assert work[f"sa_{name}_tiny_cifar"] == pytest.approx(reference, rel=0.05)


def test_the_queue_stops_resumes_and_leaves_what_is_finished(reproduce, tmp_path, monkeypatch):
    reproduce.TINY[:] = [
        reproduce.Row("wrong", "train quickstart", f"{SMALL} optim.name=none", after="first-0"),
        reproduce.Row("first", "train quickstart", SMALL),
    ]
    runs = tmp_path / "runs"
    monkeypatch.setattr(
        sys, "argv", ["reproduce.py", "--out", str(runs), "--data", str(tmp_path), "--tiny"]
    )
    with (
        signalled_by(signal.SIGTERM, runs, "first-0/history.jsonl"),
        pytest.raises(SystemExit, match="the same command continues"),
    ):
        reproduce.main()
    assert (
        list((runs / "first-0" / "checkpoints").iterdir())
        and not (runs / "logs" / "wrong-0.log").exists()
    )
    with pytest.raises(SystemExit, match=r"failed, see their logs in .*: wrong-0$"):
        reproduce.main()
    assert "expected a timm optimizer" in (runs / "logs" / "wrong-0.log").read_text()
    assert read_metrics(runs / "first-0").test.n == 354
    written = {path: path.stat().st_mtime_ns for path in runs.glob("first-0/*")}
    reproduce.TINY.pop(0)
    reproduce.main()
    assert {path: path.stat().st_mtime_ns for path in runs.glob("first-0/*")} == written
    monkeypatch.setattr(
        sys, "argv", ["reproduce.py", "--out", str(runs), "--data", str(runs), "--tiny"]
    )
    with pytest.raises(
        SystemExit, match=f"--data: got {runs}, expected {tmp_path}, as the runs in {runs} have"
    ):
        reproduce.main()
    assert (runs / "data" / "cifar10").resolve() == tmp_path
