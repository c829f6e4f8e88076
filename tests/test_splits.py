"""Which images are held out: a share of every class, by their bytes alone."""

from collections import Counter
from pathlib import Path

import pytest
from tiny_runs import image_folder, noise_images

from sa_zoo.data.config import DataConfig
from sa_zoo.data.hold_out import rows_of
from sa_zoo.data.open_images import open_images


def split(folder: Path) -> dict[str, dict[bytes, str]]:
    """Split -> bytes and class of its pictures, in their order."""
    source = open_images(DataConfig(name=str(folder)))
    found = {}
    for name, (table, rows) in rows_of(source, 0.1).items():
        images, labels = source.images[table], source.labels[table]
        found[name] = {images.content(row): source.classes[labels[row]] for row in rows.tolist()}
    return found


@pytest.mark.parametrize("n", [3, 5, 13, 211])
def test_every_class_of_three_images_or_more_is_in_every_split(tmp_path, n):
    found = split(image_folder(tmp_path, {"cat": 211, "owl": n}))
    assert sum(map(len, found.values())) == 211 + n
    for name, share in {"train": 0.72, "validation": 0.08, "test": 0.2}.items():
        owls = [*found[name].values()].count("owl")
        assert owls >= 1 and abs(owls - share * n) <= max(1.5, 0.1 * n), name


def test_a_class_of_one_or_two_images_keeps_one_to_train_on(tmp_path):
    found = split(image_folder(tmp_path, {"cat": 2, "owl": 1}))
    assert sorted(found["train"].values()) == ["cat", "owl"]
    assert [*found["test"].values()] == ["cat"] and not found["validation"]


def test_names_do_not_matter_and_one_more_picture_moves_no_other(tmp_path):
    folder = image_folder(tmp_path, {"cat": 53, "owl": 47})
    before = split(folder)
    for number, path in enumerate(sorted((folder / "owl").iterdir())):
        path.rename(path.with_name(f"{number * 7919 % 47:03} renamed.png"))
    assert [[*each] for each in split(folder).values()] == [[*each] for each in before.values()]
    for number, picture in enumerate(noise_images(5, seed=97)):
        picture.save(folder / "cat" / f"new {number}.png")
        after = split(folder)
        assert all(before[name].items() <= after[name].items() for name in before), number


def test_with_a_validation_split_nothing_is_held_out_for_it(tmp_path):
    folder = image_folder(tmp_path, {"train/a": 11, "train/b": 13, "val/a": 5, "val/b": 7})
    found = split(image_folder(folder, {"test/a": 2, "test/b": 3}))
    counts = {name: Counter(each.values()) for name, each in found.items()}
    expected = {"train": (11, 13), "validation": (5, 7), "test": (2, 3)}
    assert counts == {name: {"a": a, "b": b} for name, (a, b) in expected.items()}
