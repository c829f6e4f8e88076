import shutil

import numpy as np
import pytest
from tiny_runs import image_folder, tiny_config
from typer.testing import CliRunner

from sa_zoo.cli import app
from sa_zoo.data.config import DataConfig
from sa_zoo.data.open_images import open_images
from sa_zoo.data.report import Report, report_of
from sa_zoo.training.train import train


@pytest.fixture
def folder(tmp_path):
    """Two classes of three in the test split, an image in both splits, two broken ones, one of another format."""
    folder = image_folder(
        tmp_path / "pets",
        {"train/cat": 5, "train/owl": 3, "train/wren": 7, "test/cat": 2, "test/owl": 3},
    )
    shutil.copy(folder / "train" / "cat" / "4.png", folder / "test" / "cat" / "1.png")
    (folder / "train" / "owl" / "2.png").write_bytes(b"no image")
    cut = folder / "test" / "owl" / "0.png"
    cut.write_bytes(cut.read_bytes()[:150])
    (folder / "train" / "owl" / "3.heic").write_bytes(b"no image")
    return folder


def test_the_report_names_counts_origins_and_faults(folder):
    done = CliRunner().invoke(app, ["data", str(folder), "--set", "data.validation=0.0", "--json"])
    assert done.exit_code == 1
    broken = [str(folder / name) for name in ("train/owl/2.png", "test/owl/0.png")]
    assert all(name in done.stderr for name in broken)
    report = Report.model_validate_json(done.stdout)
    assert report.classes == ["cat", "owl", "wren"]
    assert report.images == {"train": [5, 3, 7], "test": [2, 3, 0], "validation": [0, 0, 0]}
    assert (report.origins["train"], report.origins["test"]) == ("pets/train", "pets/test")
    assert report.skipped == {".heic in train/owl": 1}
    assert report.sizes == {"8x8": 18}
    assert report.same == [f"{folder}/test/cat/1.png, image 1 of the test split"]
    assert sorted(line.split(",")[0] for line in report.unreadable) == sorted(broken)
    assert "no test images: wren" in report.text()


@pytest.mark.parametrize(("kept_bytes", "sized"), [(2**31, 19), (0, 18)])
def test_a_run_names_all_broken_images_before_its_first_step(
    folder, tmp_path, capsys, monkeypatch, kept_bytes, sized
):
    """Sizes are those of headers if the images are decoded for good."""
    monkeypatch.setattr("sa_zoo.data.splits.KEPT_BYTES", kept_bytes)
    with pytest.raises(ValueError, match=r"(?s)2 images that cannot be read.*\.png.*\.png"):
        train(tiny_config(data={"name": str(folder)}, train={"batch_size": 2}), tmp_path / "run")
    assert f"sizes: 8x8 ({sized})\n" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_headers_alone_show_sizes_and_files_that_are_no_images(folder):
    source = open_images(DataConfig(name=str(folder)))
    rows = {split: (split, np.arange(len(labels))) for split, labels in source.labels.items()}
    report = report_of(source, rows, decode=False)
    assert report.sizes == {"8x8": 19}
    assert [line.split(",")[0] for line in report.unreadable] == [str(folder / "train/owl/2.png")]
