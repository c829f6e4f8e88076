"""The tables of a folder: parquet files, images in [SPLIT/]CLASS/, or images that a metadata file describes.

Nothing else in it is read. Files that are left out are counted.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import datasets
from datasets.data_files import SPLIT_KEYWORDS

from sa_zoo.training.pictures import EXTENSIONS

METADATA = ("metadata.csv", "metadata.jsonl")  # for the "imagefolder" builder of `datasets`
# how names begin that systems give: macOS, Jupyter, Python, Windows, Synology, Office
JUNK = (".", "__macosx", "__pycache__", "thumbs.db", "desktop.ini", "$recycle", "@eadir", "~$")
SPLIT_WORDS = {str(split): words for split, words in SPLIT_KEYWORDS.items()}
Words = Mapping[str, Sequence[str]]  # by which a split is known
Used = dict[str, list[Path]]  # files by split


@dataclass(frozen=True)
class Found:
    """Tables by the name of their split, where each came from, and a count of what was skipped, by "KIND in PLACE"."""

    tables: Mapping[str, Any]
    origins: Mapping[str, str]
    skipped: Mapping[str, int]


def table_of(images: Sequence[object], labels: Any) -> datasets.Dataset:
    """Images or their files, and their classes by name or number."""
    features = datasets.Features(image=datasets.Image())
    return datasets.Dataset.from_dict({"image": images}, features).add_column("label", labels)


def tables_in(folder: Path, asked: Iterable[str]) -> Found:
    """What a folder holds; `asked` are names of splits in addition to the usual ones.

    Raises FileNotFoundError if there are no images, ValueError if they cannot be read or have no classes.
    """
    words = {name: [name] for name in asked} | SPLIT_WORDS
    files, skipped = _files_in(folder)
    parquet = [path for path in files if path.suffix == ".parquet"]
    pictures = [path for path in files if path.suffix.lower() in EXTENSIONS]
    metadata = [path for path in files if path.name in METADATA]
    if parquet:
        used = _by_split(folder, parquet, words)
        tables = _load(folder, "parquet", used)
        origins = {split: f"parquet files ({len(paths)})" for split, paths in used.items()}
    else:
        try:
            used = _by_class(folder, pictures, words)
            # "imagefolder" would sort classes as text (1, 10, 2), and leave files out without a word
            tables = {split: _table_of_classes(paths) for split, paths in used.items()}
            origins = {split: _origin(folder, paths) for split, paths in used.items()}
        except (FileNotFoundError, ValueError):
            if not metadata or not pictures:
                raise
            tables, used = _described(folder, metadata, words)
            origins = dict.fromkeys(used, "metadata file")
            files = [path for path in files if path not in metadata]
    for path in set(files).difference(*used.values()):
        skipped[f"{path.suffix.lower() or path.name} in {_place(folder, path)}"] += 1
    return Found(tables, origins, skipped)


def _files_in(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The files that people put there, and a count of the others."""
    found = []
    files = []
    skipped: Counter[str] = Counter()
    for place, folders, names in os.walk(folder, followlinks=True):
        found += [Path(place, name).as_posix() for name in names]
        if not folders and not names and not _is_junk(folder, Path(place)):
            skipped[f"empty folder in {_place(folder, Path(place))}"] += 1
    for path in map(Path, sorted(found)):
        if _is_junk(folder, path):
            skipped[f"hidden or system file in {_place(folder, path)}"] += 1
        else:
            files.append(path)
    return files, skipped


def _is_junk(folder: Path, path: Path) -> bool:
    return any(part.lower().startswith(JUNK) for part in path.relative_to(folder).parts)


def _place(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parent.as_posix()


def _split_of(name: str, words: Words) -> str:
    """The split that a name begins with, as in train-2017, test_set or Validation; empty if there is none."""
    for split, known in words.items():
        pattern = f"({'|'.join(map(re.escape, known))})(set)?(?![a-z])"
        if re.match(pattern, name, re.IGNORECASE):
            return split
    return ""


def _by_split(folder: Path, files: Iterable[Path], words: Words) -> Used:
    """Files by the split that begins their name or that of a folder; if none does, all are to train on."""
    named = defaultdict(list)
    for path in files:
        parts = path.relative_to(folder).with_suffix("").parts
        splits = filter(None, (_split_of(part, words) for part in parts))
        split = next(splits, "")
        if split:
            named[split].append(path)
    return named or {"train": list(files)}


def _by_class(folder: Path, pictures: Iterable[Path], words: Words) -> Used:
    """Images in [SPLIT/]CLASS/ by split.

    Raises ValueError for images that are in no folder of a class, FileNotFoundError for less than two classes.
    """
    used = defaultdict(list)
    for path in pictures:
        parts = path.relative_to(folder).parts
        split = _split_of(parts[0], words) if len(parts) == 3 else ""
        if len(parts) != 2 and not split:
            raise ValueError(
                f"data.name: got {folder} with images in {path.parent}, expected [SPLIT/]CLASS/IMAGE"
            )
        used[split].append(path)
    if "" in used:
        _check_classes(folder, used, words)
        used["train"] = used.pop("")
    if len({path.parent.name for paths in used.values() for path in paths}) < 2:
        raise FileNotFoundError(
            f"data.name: got {folder}, expected images or parquet files in it: a folder per class, two at least"
        )
    return used


def _check_classes(folder: Path, used: Used, words: Words) -> None:
    """Raise ValueError if images in no split are in folders of splits, or next to a training split."""
    classes = {path.parent.name for path in used[""]}
    named = {name: _split_of(name, words) for name in classes if _split_of(name, words)}
    # one class of many may be called train
    splits = len(set(named.values()))
    if "train" in used or splits > 1 or (named and (len(used) > 1 or len(named) == len(classes))):
        raise ValueError(
            f"data.name: got {folder} with images directly in {', '.join(sorted(named or classes))}, expected a "
            "split with folders of classes in it: SPLIT/CLASS/IMAGE"
        )


def _table_of_classes(paths: list[Path]) -> datasets.Dataset:
    return table_of([str(path) for path in paths], [path.parent.name for path in paths])


def _origin(folder: Path, paths: list[Path]) -> str:
    places = {path.parents[1].relative_to(folder).as_posix() for path in paths}
    return f"folder {', '.join(sorted(places))}"


def _described(folder: Path, metadata: list[Path], words: Words) -> tuple[dict[str, Any], Used]:
    """The tables of images that metadata files describe, and their files, by the split that begins their path."""
    table = _load(folder, "imagefolder", {"train": metadata})["train"]
    column = next(name for name, kind in table.features.items() if isinstance(kind, datasets.Image))
    files = [Path(each["path"]) for each in table.data.column(column).to_pylist()]
    used = _by_split(folder, files, words)
    rows = {path: row for row, path in enumerate(files)}
    tables = {}
    for split, paths in used.items():
        tables[split] = table.select([rows[path] for path in paths]).flatten_indices()
    return tables, used


def _load(folder: Path, builder: str, files: Used) -> Any:
    # `datasets` takes names for patterns
    patterns = {split: [escape(str(path)) for path in paths] for split, paths in files.items()}
    try:
        return datasets.load_dataset(builder, data_files=patterns)
    except Exception as error:  # a file may lead to an error of any type
        cause = error.__cause__ or error
        raise ValueError(
            f"data.name: got {folder}, expected images or parquet files that can be read: "
            f"{type(cause).__name__}: {cause}"
        ) from error
