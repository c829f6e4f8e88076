import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    log_loss,
    top_k_accuracy_score,
)
from tiny_runs import TINY_VIT, image_folder, tiny_config
from torch import nn

from sa_zoo.folders.metrics import Metrics, Scores
from sa_zoo.folders.opened import Opened, open_model
from sa_zoo.folders.write import write_timm_files
from sa_zoo.training.config import DataConfig, dump_config
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import class_table, open_test_split, score
from sa_zoo.training.model import InputFormat, create_model, input_format_of
from sa_zoo.training.sources import changes, digest_of, open_source
from sa_zoo.training.splits import Split, rows_of

FORMAT = InputFormat((3, 2, 2), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)


class FixedLogits(nn.Module):
    """Reads the index of an image from its first pixel, and answers with that row of a table."""

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__()
        self.logits, self.num_classes = torch.from_numpy(logits).float(), logits.shape[1]

    def forward(self, x):
        return self.logits[((x[:, 0, 0, 0] * 0.5 + 0.5) * 255).round().long()]


def scored(logits: np.ndarray, labels: np.ndarray, batch: int = 7, detail: bool = False) -> Scores:
    images = (
        torch.arange(len(labels), dtype=torch.uint8)
        .view(-1, 1, 1, 1)
        .expand(-1, 3, 2, 2)
        .contiguous()
    )
    accelerator = open_accelerator()
    split = Split(images, labels, FORMAT)
    return score(FixedLogits(logits), split, accelerator, batch, detail)


@pytest.fixture
def answers():
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 11, 101)
    logits = generator.normal(size=(101, 11)) + 1.5 * np.eye(11)[labels]
    return logits, labels


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A published, untrained model for the digits."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    out.mkdir()
    torch.manual_seed(0)
    model = create_model(tiny_config().model, 10)
    data_config = {"input_size": input_format_of(model).input_size}
    write_timm_files(
        out, model, model_config={"label_names": list("0123456789")}, data_config=data_config
    )
    return out


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def test_accuracy_and_loss_are_those_of_scikit_learn(answers):
    logits, labels = answers
    found, p = scored(*answers), probabilities(logits)
    for batch in (1, 100, 101, 997):
        assert scored(*answers, batch).model_dump() == pytest.approx(found.model_dump())
    assert found.n == 101
    assert found.top1 == accuracy_score(labels, logits.argmax(1))
    assert found.top5 == top_k_accuracy_score(labels, p, k=5)
    assert scored(logits[:, :5], labels % 5).top5 is None
    assert found.loss == pytest.approx(log_loss(labels, p), rel=1e-6)
    assert set(found.model_dump(exclude_none=True)) == {"top1", "top5", "balanced", "loss", "n"}
    assert found.balanced == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))


def test_detail_counts_classes_confusion_and_calibration(answers):
    logits, labels = answers
    found, p = scored(*answers, detail=True), probabilities(logits)
    predicted, confidence = logits.argmax(1), p.max(1)
    for true in range(11):
        assert found.per_class[true] == pytest.approx((predicted[labels == true] == true).mean())
        for guess in range(11):
            assert (
                found.confusion_matrix[true][guess]
                == ((labels == true) & (predicted == guess)).sum()
            )
    error, curve = 0.0, iter(zip(*found.calibration_curve.values(), strict=True))
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            mean = (confidence[inside].mean(), (predicted == labels)[inside].mean(), inside.sum())
            assert next(curve) == pytest.approx(mean, abs=1e-6)
            gap = (predicted == labels)[inside].mean() - confidence[inside].mean()
            error += inside.mean() * abs(gap)
    assert found.calibration_error == pytest.approx(error, abs=1e-6)
    assert Scores.model_validate_json(found.model_dump_json()) == found


def test_classes_that_never_occur_keep_their_place_in_the_detail():
    labels = np.array([0, 2, 2])
    found = scored(np.eye(4)[[0, 2, 0]] * 5, labels, detail=True)
    assert found.per_class == [1.0, None, 0.5, None] and found.images_per_class == [1, 0, 2, 0]
    assert found.balanced == 0.75
    table = class_table(found, ["ant", "bee", "cat", "dog"]).splitlines()
    assert [line.split()[:3] for line in table] == [["ant", "1", "1.0000"], ["cat", "2", "0.5000"]]
    assert np.array(found.confusion_matrix).shape == (4, 4)


def test_the_model_keeps_its_mode(answers):
    images = torch.zeros(3, 3, 2, 2, dtype=torch.uint8)
    accelerator = open_accelerator()
    model = nn.Sequential(FixedLogits(answers[0]), nn.Dropout(0.9))
    split = Split(images, np.zeros(3, dtype=np.int64), FORMAT)
    for training in (True, False):
        model.train(training)
        assert score(model, split, accelerator, batch_size=2).n == 3
        assert all(module.training is training for module in model.modules())


def opened(names: list[str], folder: Path | None = None, digest: str | None = None) -> Opened:
    """A network with classes of these names."""
    network = timm.create_model("test_vit", num_classes=3, **TINY_VIT)
    network.pretrained_cfg["label_names"] = names
    return Opened("test_vit", folder, network, {}, Metrics(data_digest=digest))


def test_classes_are_matched_by_name(tmp_path, capsys, caplog):
    """Whatever their order, and where some are missing."""
    folder = image_folder(tmp_path / "D", {"test/cat": 2, "test/owl": 5})
    model = opened(["owl", "dog", "cat"])
    source, split = open_test_split(model, DataConfig(name=str(folder)), open_accelerator())
    assert source.classes == ("owl", "dog", "cat")
    assert torch.bincount(split.labels, minlength=3).tolist() == [5, 0, 2]
    said = capsys.readouterr().err
    assert "classes matched by name" in said and "no test images: dog" in said
    image_folder(folder, {"test/zebra": 1})
    with pytest.raises(ValueError, match=r"got 3 classes, expected 3 .*, not zebra in D"):
        open_test_split(model, DataConfig(name=str(folder)), open_accelerator())
    assert not caplog.text


@pytest.mark.parametrize("names", [None, ["0", "1", "2"], ["LABEL_0", "LABEL_1", "LABEL_2"]])
def test_classes_without_names_are_matched_by_number(tmp_path, caplog, names):
    folder = image_folder(tmp_path / "D", {"test/cat": 2, "test/owl": 5})
    with pytest.raises(ValueError, match=r"data: got 2 classes, expected 3 .*0, 1, 2"):
        open_test_split(opened(names), DataConfig(name=str(folder)), open_accelerator())
    image_folder(folder, {"test/zebra": 1})
    _, split = open_test_split(opened(names), DataConfig(name=str(folder)), open_accelerator())
    assert torch.bincount(split.labels).tolist() == [2, 5, 1]
    assert "matched by number, the model's with those of D: 0 is cat, 1 is owl" in caplog.text


@pytest.mark.parametrize("known", ["", "digest", "config"])
def test_all_images_of_an_unsplit_folder_count_unless_the_model_was_trained_on_it(tmp_path, known):
    folder = image_folder(tmp_path / "D", {"cat": 13, "dog": 11, "owl": 7})
    data = DataConfig(name=str(folder))
    source = open_source(data)
    digest = digest_of(source)["hash"] if known == "digest" else "of other data"
    if known == "config":
        config = tiny_config(data={"name": str(folder), "hold_out": "position"})
        (tmp_path / "train.toml").write_text(dump_config(config))
    model = opened(["cat", "dog", "owl"], tmp_path, digest)
    count = len(open_test_split(model, data, open_accelerator())[1])
    by_content = len(rows_of(source, 0.0)["test"][1])
    assert count == {"": 31, "digest": by_content, "config": 6}[known]


@pytest.mark.parametrize("change", ["moved", "renamed", "added"])
def test_a_digest_is_that_of_the_data_wherever_they_are(tmp_path, change):
    folder = image_folder(tmp_path / "D", {"train/cat": 5, "train/owl": 3, "test/owl": 2})
    before = digest_of(open_source(DataConfig(name=str(folder))))
    if change == "moved":
        folder = folder.rename(tmp_path / "E")
    if change == "renamed":
        (folder / "train/cat/0.png").rename(folder / "train/cat/7.png")
    if change == "added":
        image_folder(folder, {"train/emu": 1, "test/owl": 3})
    now = digest_of(open_source(DataConfig(name=str(folder))))
    assert (now == before) == (change == "moved")
    found = {"added": "3 test images of owl, not 2, 1 train images of emu, not 0"}
    assert changes(before, now) == found.get(change, changes(before, before))


def test_a_run_folder_loads_bit_equal_through_timm(run_folder):
    torch.manual_seed(0)
    model = create_model(tiny_config().model, 10).eval()
    loaded = timm.create_model(f"local-dir:{run_folder}", pretrained=True).eval()
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(model(x), loaded(x))
    assert loaded.pretrained_cfg["label_names"] == list("0123456789")
    assert input_format_of(loaded) == input_format_of(model)


@pytest.mark.parametrize(
    ("kept", "depth", "error", "said"),
    [
        (0, 2, FileNotFoundError, "got none from"),
        (-5, 2, ValueError, "got a truncated or damaged file"),
        (None, 3, ValueError, "got those of another model"),
    ],
)
def test_weights_that_do_not_fit_are_reported(run_folder, tmp_path, kept, depth, error, said):
    config = json.loads((run_folder / "config.json").read_text())
    config["model_args"]["depth"] = depth
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kept != 0:
        weights = (run_folder / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(weights[:kept])
    with pytest.raises(error, match=f"weights: {said}"):
        open_model(str(tmp_path))
