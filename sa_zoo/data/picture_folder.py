"""The tables of a folder: parquet files, images in [SPLIT/]CLASS/, or images with a metadata file.

Other files are not read, only counted.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import datasets
from datasets.data_files import SPLIT_KEYWORDS

from sa_zoo.data.pictures import EXTENSIONS
from sa_zoo.folders.messages import listed

METADATA = ("metadata.csv", "metadata.jsonl")  # for the "imagefolder" builder of `datasets`
# prefixes of system files: macOS, Jupyter, Python, Windows, Synology, Office
JUNK = (".", "__macosx", "__pycache__", "thumbs.db", "desktop.ini", "$recycle", "@eadir", "~$")
SPLIT_WORDS = {str(split): words for split, words in SPLIT_KEYWORDS.items()}
Used = Mapping[str, list[Path]]  # paths in the folder by split
Found = tuple[Mapping[str, Any], Mapping[str, str], Mapping[str, int]]
"""Tables by split, their origins by split, and numbers of skipped files by "KIND in PLACE"."""


def table_of(images: Sequence[object], labels: Any) -> datasets.Dataset:
    """A table of images or their files, with classes by name or number."""
    features = datasets.Features(image=datasets.Image())
    return datasets.Dataset.from_dict({"image": images}, features).add_column("label", labels)


def tables_in(folder: Path) -> Found:
    """The tables of a folder.

    Raises FileNotFoundError if there are no images, ValueError if they cannot be read or have no classes.
    """
    everything = _files_in(folder)
    junk = {
        path for path in everything if any(name.lower().startswith(JUNK) for name in path.parts)
    }
    wanted = [path for path in everything if path not in junk]
    parquet = [path for path in wanted if path.suffix == ".parquet"]
    pictures = [path for path in wanted if path.suffix.lower() in EXTENSIONS]
    described = [path for path in wanted if path.name in METADATA]
    read = set()
    if parquet:
        used = _by_split(parquet)
        tables = _load(folder, "parquet", used)
    else:
        try:
            used = _by_class(folder, pictures)
            # "imagefolder" would sort classes as text (1, 10, 2), and omit files silently
            tables = {}
            for split, paths in used.items():
                files = [str(folder / path) for path in paths]
                tables[split] = table_of(files, [path.parent.name for path in paths])
        except ValueError:
            if not described:
                raise
            tables, used = _described(folder, described)
            read.update(described)
    skipped: Counter[str] = Counter()
    for path in set(everything).difference(read, *used.values()):
        kind = "hidden or system file" if path in junk else path.suffix.lower() or path.name
        skipped[f"{kind} in {path.parent.as_posix()}"] += 1
    origins = {}
    for split, paths in used.items():
        origins[split] = Path(folder.name, os.path.commonpath(paths)).as_posix()
    return tables, origins, skipped


def _files_in(folder: Path) -> list[Path]:
    """Relative paths of all files, sorted as text."""
    walk = os.walk(folder, followlinks=True)
    found = (Path(place, name).relative_to(folder) for place, _, names in walk for name in names)
    return sorted(found, key=Path.as_posix)


def _split_of(name: str) -> str:
    """The split at the start of a name, as in train-2017, test_set or Validation; empty if there is none."""
    for split, words in SPLIT_WORDS.items():
        if re.match(f"({'|'.join(words)})(set)?(?![a-z])", name, re.IGNORECASE):
            return split
    return ""


def _by_split(files: Iterable[Path]) -> Used:
    """Files by the split at the start of a folder or file name; without any split, all are training files."""
    used = defaultdict(list)
    for path in files:
        splits = filter(None, (_split_of(part) for part in path.with_suffix("").parts))
        used[next(splits, "")].append(path)
    others = used.pop("", [])
    return used or {"train": others}


def _by_class(folder: Path, pictures: Sequence[Path]) -> Used:
    """Images by split, all in CLASS/ or all in SPLIT/CLASS/.

    Raises FileNotFoundError if there are none, ValueError for images elsewhere or of one class only.
    """
    if not pictures:
        raise FileNotFoundError(
            f"data.name: got {folder}, expected images or parquet files in it: a folder per class, two at least"
        )
    classes = {path.parent.name for path in pictures}
    depths = Counter(len(path.parts) for path in pictures)
    used = defaultdict(list)
    for path in pictures:
        used[_split_of(path.parts[0])].append(path)
    if len(classes) > 1:
        if set(depths) == {3} and "" not in used:
            return used
        # one class of many may be called train
        if set(depths) == {2} and len(list(filter(_split_of, classes))) < 2:
            return {"train": list(pictures)}
    rare = sorted({path.parent for path in pictures}, key=lambda at: depths[len(at.parts) + 1])
    raise ValueError(
        f"data.name: got {folder} with images in {listed(rare)}, expected a folder of each class, two at least: "
        "all images in CLASS/ or all in SPLIT/CLASS/, such as train/cat/1.jpg"
    )


def _described(folder: Path, metadata: list[Path]) -> tuple[dict[str, Any], Used]:
    """The tables of the images in metadata files, and their paths, by the split in each path."""
    table = _load(folder, "imagefolder", {"train": metadata})["train"]
    paths = (Path(each["path"]) for each in table.data.column("image").to_pylist())
    rows = {path.relative_to(folder): row for row, path in enumerate(paths)}
    used = _by_split(rows)
    tables = {}
    for split, files in used.items():
        tables[split] = table.select([rows[path] for path in files]).flatten_indices()
    return tables, used


def _load(folder: Path, builder: str, files: Used) -> Any:
    # `datasets` treats names as patterns
    patterns = {
        split: [escape(str(folder / path)) for path in paths] for split, paths in files.items()
    }
    try:
        return datasets.load_dataset(builder, data_files=patterns)
    except Exception as error:  # bad files raise errors of any type
        cause = error.__cause__ or error
        raise ValueError(
            f"data.name: got {folder}, expected images or parquet files that can be read: "
            f"{type(cause).__name__}: {cause}"
        ) from error
