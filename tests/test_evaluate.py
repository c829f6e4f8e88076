from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from scipy.special import softmax
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    confusion_matrix,
    log_loss,
    top_k_accuracy_score,
)
from tiny_runs import TINY_VIT, image_folder, noise_images
from torch import nn

from sa_zoo.data.config import DataConfig
from sa_zoo.data.hold_out import drawn_for, largest_draws, rows_of
from sa_zoo.data.image_file import open_image
from sa_zoo.data.images import LabeledImages, changes, digest_of
from sa_zoo.data.input_format import InputFormat
from sa_zoo.data.open_images import open_images
from sa_zoo.data.splits import Split
from sa_zoo.folders.metrics import Metrics, Scores
from sa_zoo.opened import Opened
from sa_zoo.training.device import open_accelerator
from sa_zoo.training.evaluate import open_test_split, score

FORMAT = InputFormat((3, 2, 2), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0)


class FixedLogits(nn.Module):
    """Reads the index of an image from its first pixel, and answers with that row of a table."""

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__()
        self.logits, self.num_classes = torch.from_numpy(logits).float(), logits.shape[1]

    def forward(self, x):
        assert not self.training
        return self.logits[((x[:, 0, 0, 0] * 0.5 + 0.5) * 255).round().long()]


def scored(logits: np.ndarray, labels: np.ndarray, batch: int = 7, detail: bool = False) -> Scores:
    indices = torch.arange(len(labels), dtype=torch.uint8)
    split = Split(indices.view(-1, 1, 1, 1).expand(-1, 3, 2, 2), labels, FORMAT)
    model = FixedLogits(logits)
    found = score(model, split, open_accelerator(), batch, detail)
    assert model.training, "as before"
    return found


@pytest.fixture
def answers():
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 11, 101)
    logits = generator.normal(size=(101, 11)) + 1.5 * np.eye(11)[labels]
    return logits, labels


def test_accuracy_and_loss_are_those_of_scikit_learn(answers):
    logits, labels = answers
    found, p = scored(*answers), softmax(logits, axis=1)
    for batch in (1, 100, 101, 997):
        assert scored(*answers, batch).model_dump() == pytest.approx(found.model_dump())
    assert found.n == 101
    assert found.top1 == accuracy_score(labels, logits.argmax(1))
    assert found.top5 == top_k_accuracy_score(labels, p, k=5)
    assert scored(logits[:, :5], labels % 5).top5 is None
    assert found.loss == pytest.approx(log_loss(labels, p), rel=1e-6)
    assert set(found.model_dump(exclude_none=True)) == {"top1", "top5", "balanced", "loss", "n"}
    assert found.balanced == pytest.approx(balanced_accuracy_score(labels, logits.argmax(1)))


def test_detail_counts_classes_and_confusion(answers):
    logits, labels = answers
    found = scored(*answers, detail=True)
    predicted = logits.argmax(1)
    right = predicted == labels
    assert found.confusion_matrix == confusion_matrix(labels, predicted).tolist()
    for true in range(11):
        assert found.per_class[true] == pytest.approx(right[labels == true].mean())
    assert Scores.model_validate_json(found.model_dump_json()) == found


def test_classes_that_never_occur_keep_their_place_in_the_detail():
    labels = np.array([0, 2, 2])
    found = scored(np.eye(4)[[0, 2, 0]] * 5, labels, detail=True)
    assert found.per_class == [1.0, None, 0.5, None] and found.images_per_class == [1, 0, 2, 0]
    assert found.balanced == 0.75
    assert np.array(found.confusion_matrix).shape == (4, 4)


def opened(names: list[str] | None) -> Opened:
    """A network with classes of these names."""
    network = timm.create_model("test_vit", num_classes=3, **TINY_VIT)
    network.pretrained_cfg["label_names"] = names
    return Opened("test_vit", None, network, {}, Metrics())


def split_for(model: Opened, folder: Path) -> tuple[LabeledImages, Split]:
    return open_test_split(model, DataConfig(name=str(folder)), open_accelerator())


def test_classes_are_matched_by_name(tmp_path, capsys, caplog):
    """Whatever their order and the precision of the network, and where some are missing."""
    folder = image_folder(tmp_path / "D", {"test/cat": 2, "test/owl": 5})
    model = opened(["owl", "dog", "cat"])
    source, split = split_for(model, folder)
    assert source.classes == ("owl", "dog", "cat")
    assert torch.bincount(split.labels, minlength=3).tolist() == [5, 0, 2]
    losses = [
        score(model.network.to(dtype), split, open_accelerator()).loss
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    assert losses == pytest.approx(losses[:1] * 3, rel=0.02)
    said = capsys.readouterr().err
    assert "classes matched by name" in said and "no test images: dog" in said
    image_folder(folder, {"test/zebra": 1})
    with pytest.raises(ValueError, match=r"got 3 classes, expected 3 .*, not zebra in D"):
        split_for(model, folder)
    assert not caplog.text


@pytest.mark.parametrize("names", [None, ["LABEL_0", "LABEL_1", "LABEL_2"]])
def test_classes_without_names_are_matched_by_number(tmp_path, caplog, names):
    folder = image_folder(tmp_path / "D", {"test/cat": 2, "test/owl": 5})
    with pytest.raises(ValueError, match=r"data: got 2 classes, expected 3 .*0, 1, 2"):
        split_for(opened(names), folder)
    image_folder(folder, {"test/zebra": 1})
    _, split = split_for(opened(names), folder)
    assert torch.bincount(split.labels).tolist() == [2, 5, 1]
    assert "matched by number, the model's with those of D: 0 is cat, 1 is owl" in caplog.text


def test_no_training_image_is_counted_in_a_changed_copy(tmp_path, capsys):
    """Images were renamed, added and removed, in a small class, too, since the run held out its test images."""
    folder = image_folder(tmp_path / "D", {"cat": 53, "dog": 31, "owl": 5})
    data = open_images(DataConfig(name=str(folder)))
    rows = rows_of(data, 0.1)
    trained = {data.images["train"].content(row) for row in rows["train"][1].tolist()}
    held_out = largest_draws(data, rows["test"][1])
    model = opened(["cat", "dog", "owl"])
    model = replace(model, metrics=Metrics(held_out=held_out))
    assert len(split_for(model, folder)[1]) == len(rows["test"][1])
    folder = folder.rename(tmp_path / "E")
    for number in range(2, 13):  # one of them was held out
        (folder / "cat" / f"{number}.png").rename(folder / "cat" / f"x{number}.png")
    for row in rows["test"][1].tolist():
        path = Path(data.images["train"].path(row).replace("/D/", "/E/"))
        if path.parent.name == "owl":
            path.unlink()
    for seed, image in enumerate(noise_images(7, seed=97)):
        image.save(folder / "owl" / f"new{seed}.png")
    _, split = split_for(model, folder)
    counted = {pixels.permute(1, 2, 0).numpy().tobytes() for pixels in split.images}
    pixels = {np.array(open_image(BytesIO(content))).tobytes() for content in trained}
    assert not counted & pixels and len(split) > 10
    assert len(split_for(opened(["cat", "dog", "owl"]), folder)[1]) == 53 + 31 + 11
    assert "nothing says whether" in capsys.readouterr().err


def test_a_draw_by_name_is_claimed_for_the_same_data_only(tmp_path, capsys):
    """At any place, but not after an image was renamed."""
    folder = image_folder(tmp_path / "D", {"cat": 53, "owl": 47})
    data = drawn_for(open_images(DataConfig(name=str(folder))), kept=False)
    rows = rows_of(data, 0.1)
    held_out = largest_draws(data, rows["test"][1])
    metrics = Metrics(held_out=held_out, data_digest=digest_of(data)["hash"])
    model = replace(opened(["cat", "owl"]), metrics=metrics)
    folder = folder.rename(tmp_path / "E")
    _, split = split_for(model, folder)
    tested = {data.images["train"].names[row] for row in rows["test"][1].tolist()}
    assert len(split) == len(tested)
    assert "renamed" not in capsys.readouterr().err
    name = min(data.images["train"].names)
    (folder / name).rename(folder / f"{name}.png")
    split_for(model, folder)
    assert "renamed since" in capsys.readouterr().err


def test_a_digest_is_that_of_the_data_wherever_they_are(tmp_path):
    folder = image_folder(tmp_path / "D", {"train/cat": 5, "train/owl": 3, "test/owl": 2})

    def digest() -> dict:
        return digest_of(open_images(DataConfig(name=str(folder))))

    before = digest()
    folder = folder.rename(tmp_path / "E")
    assert digest() == before
    image = folder / "train/cat/0.png"
    image = image.rename(image.with_name("00.png"))  # in the same order
    assert changes(before, digest()).startswith("images of other names")
    image = image.rename(image.with_name("0.png"))
    image.write_bytes(image.read_bytes() + b"more")
    assert digest() != before
