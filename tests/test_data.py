import io
import json
import sys
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import ImageDataset, create_transform
from timm.data.readers.reader_image_folder import find_images_and_targets
from tiny_runs import image_folder, noise_images, parquet_folder
from torchvision.transforms.functional import normalize

from sa_zoo.data import open_images as opening
from sa_zoo.data.config import DataConfig
from sa_zoo.data.hold_out import counter_hash, rows_of
from sa_zoo.data.images import LabeledImages
from sa_zoo.data.input_format import InputFormat
from sa_zoo.data.open_images import open_images
from sa_zoo.data.splits import Split, splits_of
from sa_zoo.training.augment import CROP_COLUMNS, CROP_ROWS, FLIP, Augment
from sa_zoo.training.config import AugmentConfig

CPU = torch.device("cpu")
FORMAT = InputFormat((3, 8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", 1.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def source_of(name: object, **config: str) -> LabeledImages:
    return open_images(DataConfig(name=str(name), **config))


def splits_in(
    name: object, validation: float = 0.0, form: InputFormat = FORMAT, workers: int = -1
) -> dict[str, Split]:
    data = source_of(name)
    return splits_of(data, rows_of(data, validation), form, CPU, workers)


def sizes(source: LabeledImages) -> dict[str, int]:
    return {split: len(labels) for split, labels in source.labels.items()}


def test_digits_are_those_of_scikit_learn_split_for_good():
    splits = splits_in("digits", 0.1)
    found = {name: len(split) for name, split in splits.items()}
    assert found == {"train": 1309, "validation": 134, "test": 354}
    # all splits together hold exactly the 1,797 digits, as gray levels of scikit-learn's sixteenths
    digits, numbers = load_digits(return_X_y=True)
    gray = (digits * 255 / 16).round().astype(np.uint8)
    images = torch.cat([split.images for split in splits.values()])
    labels = torch.cat([split.labels for split in splits.values()])
    assert torch.equal(images[:, 0], images[:, 2])
    pairs = zip(images[:, 0].flatten(1).tolist(), labels.tolist(), strict=True)
    assert sorted(pairs) == sorted(zip(gray.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("workers", [2, 0])
def test_streamed_and_kept_images_are_the_same(tmp_path, monkeypatch, workers):
    images = {"train": noise_images(23, (9, 10)), "test": noise_images(7, seed=1)}
    folder = parquet_folder(tmp_path / "tiny", images)
    kept = splits_in(folder, 0.3)
    monkeypatch.setattr("sa_zoo.data.splits.MANY", 0)  # more are decoded by workers
    again = splits_in(folder, 0.3, workers=workers)
    assert all(torch.equal(kept[name].images, again[name].images) for name in kept)
    monkeypatch.setattr("sa_zoo.data.splits.KEPT_BYTES", (23 + 7) * 3 * 8 * 8 - 1)
    streamed = splits_in(folder, 0.3, workers=workers)
    assert (kept["train"].workers, streamed["train"].workers) == (0, workers)
    batches = np.array([[3, 1, 2], [0, 5, 4]])
    for name, order in {"test": {"batch_size": 4}, "train": {"batch_sampler": batches}}.items():
        loaders = kept[name].loader(**order), streamed[name].loader(**order)
        for a, b in zip(*loaders, strict=True):
            assert all(torch.equal(x, torch.as_tensor(y)) for x, y in zip(a, b, strict=True))


def augment_of(**config: object) -> Augment:
    return Augment(AugmentConfig(**config), 5, 10, lambda x: x)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize(("fill", "mode"), [("black", "constant"), ("reflect", "reflect")])
def test_crop_and_flip_are_those_of_each_image_alone(fill, mode, alternate):
    """Alternating flips are drawn once, and turned over in every epoch."""
    images = torch.randint(0, 256, (11, 3, 5, 7), dtype=torch.uint8)
    indices, padding, epoch = torch.arange(100, 111), 2, 3
    flip = "alternate_flips" if alternate else "flip"
    augment = augment_of(crop_padding=padding, crop_fill=fill, **{flip: True})
    got, _ = augment(images, torch.zeros(11), indices, epoch)
    flips = 0
    for image, index, result in zip(images.numpy(), indices.tolist(), got.numpy(), strict=True):
        top, left = (
            int(counter_hash(s, 5, epoch, index)[0]) % (2 * padding + 1)
            for s in (CROP_ROWS, CROP_COLUMNS)
        )
        padded = np.pad(image, ((0, 0), (padding,) * 2, (padding,) * 2), mode)
        wanted = padded[:, top : top + 5, left : left + 7]
        drawn = int(counter_hash(FLIP, 5, 0 if alternate else epoch, index)[0])
        if (drawn + epoch) % 2 if alternate else drawn >> 63:
            wanted, flips = wanted[:, :, ::-1], flips + 1
        assert np.array_equal(result, wanted)
    assert 0 < flips < 11


def test_images_are_small_in_the_first_epochs_as_in_pillow():
    # Pillow clips between its two passes, and rounds
    images = torch.randint(80, 180, (3, 3, 17, 17), dtype=torch.uint8)
    augment = augment_of(half_epochs=1, small_epochs=3)
    for epoch, side in enumerate((8, 12, 12, 17)):
        results = augment(images, torch.zeros(3), torch.arange(3), epoch)[0]
        for image, result in zip(images, results, strict=True):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy())
            wanted = np.array(picture.resize((side, side), Image.Resampling.BICUBIC))
            assert np.abs(result.permute(1, 2, 0).numpy() - wanted).max() < (
                1.5 if side < 17 else 1e-9
            )


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "~nobody-of-that-name/pets", "EMPTY"])
def test_a_missing_or_empty_folder_is_reported(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"^data\.name: got .*, expected .*images"):
        source_of(name.replace("EMPTY", str(tmp_path)))


@pytest.mark.parametrize(
    "counts",
    [
        {"a/x": 2, "a/y": 2, "b/x": 3},
        {"train/a": 2, "train/b/x": 3},
        {"a": 2, "b": 2, ".": 1},
        {"train": 3},
        {"cat": 3},
        {"Training": 3, "test": 2},
        {"train/a": 2, "train/b": 3, "test": 5},
    ],
)
def test_images_without_folders_of_classes_are_refused(tmp_path, counts):
    """Splits do not become classes."""
    folder = image_folder(tmp_path / "images", counts)
    with pytest.raises(ValueError, match=r"with images in .*, expected a folder of each class"):
        source_of(folder)


@pytest.mark.parametrize(
    ("columns", "asked", "label"),
    [
        (("coarse_label", "fine_label"), "", "fine_label"),
        (("coarse_label", "fine_label"), "coarse_label", "coarse_label"),
        (("mine", "yours"), "", None),
    ],
)
def test_labels_are_those_asked_for_or_of_a_usual_name(tmp_path, columns, asked, label):
    folder = parquet_folder(tmp_path / "two", {"test": noise_images(7)}, columns=columns)
    if not label:
        with pytest.raises(ValueError, match=r"data.label_column: got .*, expected one of img"):
            source_of(folder)
        return
    source = source_of(folder, label_column=asked)
    assert source.classes[0] == f"{label} 0"
    assert sizes(source) == {"train": 0, "test": 7}


def test_splits_are_chosen_by_name_where_labels_are_hidden(tmp_path):
    images = {"train": noise_images(7), "val": noise_images(5)}
    folder = parquet_folder(tmp_path / "hidden", images, classes=2)
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(num_classes=2))
    rows = datasets.Dataset.from_dict({"img": noise_images(2), "label": [1, -1]}, features)
    rows.to_parquet(folder / "test.parquet")
    with pytest.raises(ValueError, match=r"got class -1 in .*split test.*1 of 2.*data\.test_split"):
        source_of(folder)
    source = source_of(folder, test_split="validation")
    assert sizes(source) == {"train": 7, "test": 5}
    assert source.skipped == {"images of split test": 2}
    with pytest.raises(ValueError, match=r"splits .*validation.*data\.train_split"):
        source_of(folder, train_split="a")


def png(image: Image.Image) -> bytes:
    image.save(content := io.BytesIO(), "PNG")
    return content.getvalue()


@pytest.mark.parametrize(
    ("wrapped", "labels", "classes"),
    [
        (False, ["10", "9", "cat", "9"], ("9", "10", "cat")),
        (True, ["owl", "cat", "cat", "owl"], ("cat", "owl")),
        (True, [2021, 1999, 2021, 7], ("7", "1999", "2021")),
    ],
)
def test_bytes_are_images_and_text_labels_classes(tmp_path, wrapped, labels, classes):
    """As pandas writes them. The test split lacks a class."""
    images = [png(image) for image in noise_images(4)]
    cells = [{"bytes": each, "path": None} for each in images] if wrapped else images
    parts = {"train": slice(0, 4), "test": slice(1, 3)}
    for split, rows in parts.items():
        table = pandas.DataFrame({"image": cells[rows], "label": labels[rows]})
        table.to_parquet(tmp_path / f"{split}.parquet")
    source = source_of(tmp_path)
    assert source.classes == classes
    for split, rows in parts.items():
        assert [classes[label] for label in source.labels[split]] == list(map(str, labels[rows]))
        assert [png(image) for image in source.images[split]] == images[rows]


def test_a_configuration_of_a_data_set_is_chosen_by_its_key(tmp_path, monkeypatch):
    data = tmp_path / "data"
    for name, n in (("small", 3), ("large", 5)):
        parquet_folder(data / name, {"train": noise_images(n)})
    assert sizes(source_of(data, config="small")) == {"train": 3}
    configs = [{"config_name": name, "data_dir": name} for name in ("small", "large")]
    (data / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    # a data set of the Hub, as far as sa_zoo knows
    monkeypatch.setattr(opening, "folder_of", lambda config: None)
    monkeypatch.setattr(opening, "repo_exists", lambda name, repo_type: True)
    with pytest.raises(ValueError, match=r"(?s)data\.config: got ''.*small.*large"):
        source_of(data)
    source = source_of(data, config="large")
    assert sizes(source) == {"train": 5}
    assert source.origins == {"train": "split train on the Hub"}


def described_folder(folder: Path, kind: str, labels: list[str]) -> Path:
    """Images with a metadata file, in folders of two splits."""
    image_folder(folder, {"train": len(labels), "test": 2, "more": 1})
    rows = [(f"train/{n}.png", label) for n, label in enumerate(labels)]
    rows += [rows[0], ("test/1.png", labels[0])]  # the first one twice
    lines = ["file_name,label", *map(",".join, rows)]
    if kind == "jsonl":
        lines = [f'{{"file_name": "{name}", "label": {label}}}' for name, label in rows]
    (folder / f"metadata.{kind}").write_text("\n".join(lines), encoding="utf-8-sig")
    return folder


TEXTS = ["001", "1", "1e3", "NA", "None", "True"]


@pytest.mark.parametrize(
    ("kind", "labels", "classes"),
    [
        ("csv", TEXTS, TEXTS),
        ("jsonl", ["2021", "1.50", '"owl"', "true"], ["2021", "1.50", "owl", "True"]),
    ],
)
def test_labels_of_a_metadata_file_are_text(tmp_path, kind, labels, classes):
    folder = described_folder(tmp_path / "data", kind, labels)
    source = source_of(folder)
    found = [source.classes[label] for label in source.labels["train"]]
    assert sorted(source.classes) == sorted(found) == sorted(classes)
    assert source.classes[source.labels["test"][0]] == found[0]
    assert source.images["test"].path(0) == str(folder / "test" / "1.png")
    assert source.skipped == {".png in test": 1, ".png in more": 1}


def test_names_of_described_images_are_no_splits(tmp_path):
    folder = image_folder(tmp_path / "data", {".": 3})
    (folder / "0.png").rename(folder / "train0.png")
    rows = "file_name,label\ntrain0.png,cat\n1.png,owl\n2.png,owl\n"
    (folder / "metadata.csv").write_text(rows)
    assert sizes(source_of(folder)) == {"train": 3}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train/0.png,owl", "train/0.png is cat and owl"),
        ("train/7.png,cat", "train/7.png is missing"),
        ("../data2/0.png,cat", "../data2/0.png is missing"),
        ("train/1.png", "got class  in"),
        ('"', "unexpected end"),
    ],
)
def test_a_metadata_file_that_contradicts_itself_or_the_folder_is_refused(tmp_path, line, said):
    image_folder(tmp_path / "data2", {".": 1})
    folder = image_folder(tmp_path / "data", {"train": 2})
    (folder / "metadata.csv").write_text(f"file_name,label\ntrain/0.png,cat\n{line}\n")
    with pytest.raises(ValueError, match=said):
        source_of(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_links_to_themselves_end_and_unusable_names_are_all_named(tmp_path):
    folder = image_folder(tmp_path / "data", {"cat": 2, "owl": 3})
    (folder / "cat" / "again").symlink_to(folder)
    assert sizes(source_of(folder)) == {"train": 5}
    for name in ("gone1.png", "gone2.png", "\udcff.png"):
        (folder / "owl" / name).symlink_to("missing")
    with pytest.raises(ValueError, match=r"(?s)3 unusable.*gone1.*gone2.*udcff.png: the name is"):
        source_of(folder)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["data/train-0", "data/train-1", "data/validation-0"], {"train": 3, "test": 3}),
        (["Train/0", "test/0", "val/0"], {"train": 1, "validation": 3, "test": 2}),
        (["train", "extra"], {"train": 1}),
        (["a[1]/train*", "a[1]/test"], {"train": 1, "test": 2}),
    ],
)
def test_parquet_files_belong_to_the_split_in_their_path(tmp_path, names, found):
    for n, name in enumerate(names, start=1):
        folder = parquet_folder(tmp_path / "one", {"some": noise_images(n)})
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        next(folder.iterdir()).rename(tmp_path / "all" / f"{name}.parquet")
    assert sizes(source_of(tmp_path / "all")) == found


@pytest.mark.parametrize(
    ("counts", "others", "found"),
    [
        (
            {"train/b": 5, "train/a test": 3, "Test/b": 2, "Test/a test": 1},
            {"train/b/._0.png": "train/b", "__MACOSX/train/b/0.png": "__MACOSX/train/b"},
            {"train": 8, "test": 3},
        ),
        (
            {"train/bus": 5, "train/train": 3, "val/bus": 2},
            {
                "train/bus/Thumbs.db": "train/bus",
                "val/.ipynb_checkpoints/0.png": "val/.ipynb_checkpoints",
            },
            {"train": 8, "test": 2},
        ),
        ({"pass": 5, "fail": 3, "val": 2}, {}, {"train": 10}),
        ({"1": 1, "2": 1, "10": 1, "11": 1, "a2": 1, "A10": 1}, {}, {"train": 6}),
    ],
)
def test_folders_are_read_in_the_order_of_timm(tmp_path, monkeypatch, counts, others, found):
    """By any path to it. Files of systems are skipped and counted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = image_folder(tmp_path / "test images", counts)
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"no image")
    (tmp_path / "link").symlink_to(folder)
    source = source_of("~/../" + f"{tmp_path.name}/link")
    assert (source.name, sizes(source)) == (folder.name, found)
    assert source.skipped == {f"hidden or system file in {place}": 1 for place in others.values()}
    for split, images in source.images.items():
        for row, label in enumerate(source.labels[split]):
            assert Path(images.path(row)).parent.name == source.classes[label]
    root = folder if "/" not in next(iter(counts)) else folder / "train"
    _, order = find_images_and_targets(str(root))
    assert {name: number for number, name in enumerate(source.classes)} == order


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm leaves files open
@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_images_get_the_color_and_size_of_the_model_as_in_timm(tmp_path, channels, mode):
    """Images of every mode in one folder, compared with timm's data set and transform."""
    folder = image_folder(tmp_path / "mixed" / "test", {"class0": 0, "class1": 0})
    for i, found in enumerate(["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"]):
        kind = "jpg" if found == "CMYK" else "png"
        size = (8, 8) if i % 2 else (13, 11)
        image = noise_images(1, size, seed=i)[0].convert(found)
        image.save(folder / f"class{i % 2}" / f"{i}.{kind}")
    input_format = InputFormat((channels, 8, 8), (0.5,), (0.2,), "bicubic", 1.0)
    test = splits_in(folder.parent, form=input_format)["test"]
    transform = create_transform(
        (channels, 8, 8), interpolation="bicubic", crop_pct=1.0, normalize=False
    )
    expected = ImageDataset(str(folder), input_img_mode=mode, transform=transform)
    assert len(test) == len(expected) == 7
    for got, label, (image, target) in zip(test.images, test.labels, expected, strict=True):
        assert torch.equal(got, image) and int(label) == target


def splitmix(state: int) -> int:
    """Next output of SplitMix64 in Python's integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_hash_is_splitmix_chained_over_its_counters():
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    for counters in [(0,), (3,), (2, 2**63), (5, 7, 11)]:
        state = 0
        for counter in counters:
            state = splitmix((state + counter) % 2**64)
        assert int(counter_hash(*counters)[0]) == state


def test_images_are_normalized_as_in_torchvision():
    images = torch.randint(0, 256, (3, 3, 5, 7), dtype=torch.uint8)
    expected = normalize(images / 255, FORMAT.mean, FORMAT.std)
    assert torch.allclose(FORMAT.normalize(images), expected, atol=1e-5)


def test_every_image_that_does_not_fit_is_named(tmp_path):
    folder = image_folder(tmp_path / "pets", {"train/cat": 3, "train/dog": 1, "test/cat": 1})
    (folder / "train" / "cat" / "1.png").write_bytes(b"no image")
    four = InputFormat((4, 8, 8), (0.5,) * 4, (0.2,) * 4, "bicubic", 1.0)
    cannot = r"/train/cat/1[.]png, image 1 of the train split: cannot identify"
    channels = r"image 3 .*: got 3 channels \(mode RGB\), expected 4"
    with pytest.raises(ValueError, match=rf"(?s)got 5 images .*{cannot}.*{channels}"):
        splits_in(folder, form=four)
