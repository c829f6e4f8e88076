"""The tables of a folder: parquet files, images in [SPLIT/]CLASS/, or images with a metadata file.

Other files are not read, only counted.
"""

import csv
import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from glob import escape
from pathlib import Path
from posixpath import basename, commonpath, dirname, join, normpath, splitext
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets.data_files import SPLIT_KEYWORDS

from sa_zoo.data.image_file import EXTENSIONS
from sa_zoo.folders.messages import listed

METADATA = ("metadata.csv", "metadata.jsonl")
LABELS = ("label", "labels", "fine_label")  # usual names of a column
# prefixes of system files: macOS, Jupyter, Python, Windows, Synology, Office
JUNK = re.compile(
    r"(^|/)(\.|__macosx|__pycache__|thumbs\.db|desktop\.ini|\$recycle|@eadir|~\$)", re.IGNORECASE
)
SPLIT_WORDS = {str(split): words for split, words in SPLIT_KEYWORDS.items()}
# Paths in the folder are text with "/": Path objects of a million files take a minute
Used = Mapping[str, list[str]]  # such paths by split
Found = tuple[Mapping[str, Any], Mapping[str, str], Mapping[str, int]]
"""Tables by split, their origins by split, and numbers of skipped files by "KIND in PLACE"."""


def table_of(images: Sequence[object], labels: Any, label: str = "label") -> datasets.Dataset:
    """A table of images or their files, with classes by name or number."""
    features = datasets.Features(image=datasets.Image())
    table = datasets.Dataset.from_dict({"image": pa.array(images)}, features)
    return table.add_column(label, labels)


def tables_in(folder: Path, label_column: str = "") -> Found:
    """The tables of a folder.

    Raises FileNotFoundError if there are no images, ValueError if they cannot be read or have no classes.
    """
    found = dict(sorted(_files_in(str(folder))))
    junk = set(filter(JUNK.search, found))
    wanted = [path for path in found if path not in junk]
    endings = {path: splitext(path)[1] for path in found}
    parquet = [path for path in wanted if endings[path] == ".parquet"]
    images = [path for path in wanted if endings[path].lower() in EXTENSIONS]
    described = [path for path in wanted if basename(path) in METADATA]
    _refuse_unusable(folder, images, found)
    read = set()
    if parquet:
        used = _by_split({path: splitext(path)[0] for path in parquet})
        tables = _parquet_tables(folder, used)
    else:
        label = "label"
        try:
            used = _by_class(folder, images)
            classes = {path: basename(dirname(path)) for path in images}
        except ValueError:
            if not described:
                raise
            label, classes = _described(folder, described, {*images}, label_column)
            used = _by_split({path: dirname(path) for path in classes})
            read.update(described)
        # the builder "imagefolder" would sort classes as text (1, 10, 2), and guess types of labels
        tables = {}
        for split, paths in used.items():
            files = [f"{folder}/{path}" for path in paths]
            tables[split] = table_of(files, [classes[path] for path in paths], label)
    skipped: Counter[str] = Counter()
    for path in found.keys() - read.union(*used.values()):
        kind = "hidden or system file" if path in junk else endings[path].lower() or basename(path)
        skipped[f"{kind} in {dirname(path) or '.'}"] += 1
    origins = {}
    for split, paths in used.items():
        origins[split] = Path(folder.name, commonpath([min(paths), max(paths)])).as_posix()
    return tables, origins, skipped


def _files_in(
    folder: str, prefix: str = "", above: tuple[str, ...] = ()
) -> Iterator[tuple[str, bool]]:
    """All files, and whether each exists, also through links, but not into a folder that contains itself."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files_in(entry.path, f"{prefix}{entry.name}/", (*above, real))
            else:
                yield prefix + entry.name, entry.is_file()


def _refuse_unusable(folder: Path, images: Iterable[str], exists: Mapping[str, bool]) -> None:
    """Raise ValueError with all dead links and all names that are not text."""
    wrong = []
    for path in images:
        name = path.encode(errors="backslashreplace").decode()
        if name != path:
            wrong.append(f"{name}: the name is not UTF-8")
        elif not exists[path]:
            wrong.append(f"{name}: the link leads nowhere")
    if wrong:
        named = "\n".join(wrong)
        raise ValueError(f"data.name: got {len(wrong)} unusable images in {folder}: {named}")


@cache
def _split_of(name: str) -> str:
    """The split at the start of a name, as in train-2017, test_set or Validation; empty if there is none."""
    for split, words in SPLIT_WORDS.items():
        if re.match(f"({'|'.join(words)})(set)?(?![a-z])", name, re.IGNORECASE):
            return split
    return ""


def _by_split(names: Mapping[str, str]) -> Used:
    """Files by the split at the start of a part of their names; without any split, all are training files."""
    used = defaultdict(list)
    for path, name in names.items():
        splits = filter(None, map(_split_of, name.split("/")))
        used[next(splits, "")].append(path)
    others = used.pop("", [])
    return used or {"train": others}


def _by_class(folder: Path, images: Sequence[str]) -> Used:
    """Images by split, all in CLASS/ or all in SPLIT/CLASS/.

    Raises FileNotFoundError if there are none, ValueError for images elsewhere or of one class only.
    """
    if not images:
        raise FileNotFoundError(
            f"data.name: got {folder}, expected images or parquet files in it: a folder per class, two at least"
        )
    depths = Counter(path.count("/") for path in images)
    classes = {basename(dirname(path)) for path in images}
    used = defaultdict(list)
    for path in images:
        used[_split_of(path.partition("/")[0])].append(path)
    if len(classes) > 1:
        if set(depths) == {2} and "" not in used:
            return used
        # one class of many may be called train
        if set(depths) == {1} and len(list(filter(_split_of, classes))) < 2:
            return {"train": list(images)}
    folders = {dirname(path) or ".": depths[path.count("/")] for path in images}
    rare = sorted(folders, key=lambda at: folders[at])
    raise ValueError(
        f"data.name: got {folder} with images in {listed(rare)}, expected a folder of each class, two at least: "
        "all images in CLASS/ or all in SPLIT/CLASS/, such as train/cat/1.jpg"
    )


def _described(
    folder: Path, metadata: Iterable[str], images: set[str], column: str
) -> tuple[str, dict[str, str]]:
    """The name of the label column, and the label of each image in metadata files, as text.

    Raises ValueError for files that cannot be read, and names images that are missing or have several labels.
    """
    labels: dict[str, str] = {}
    wrong = []
    for path in metadata:
        for row in _read_metadata(folder / path):
            column = column or next((name for name in LABELS if name in row), "")
            if not {"file_name", column} <= row.keys():
                raise ValueError(
                    f"data.label_column: got {path} with the columns {', '.join(map(str, row))}, expected file_name "
                    f"and {column or 'label'}"
                )
            image = normpath(join(dirname(path), str(row["file_name"])))
            label = "" if row[column] is None else str(row[column])
            if image not in images:
                wrong.append(f"{image} is missing")
            elif labels.setdefault(image, label) != label:
                wrong.append(f"{image} is {labels[image]} and {label}")
    if wrong:
        raise ValueError(f"data.name: got {folder} with metadata in which {listed(wrong)}")
    return column, labels


def _read_metadata(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text), strict=True))
        lines = filter(str.strip, text.split("\n"))
        return [dict(json.loads(line, parse_int=str, parse_float=str)) for line in lines]
    except (csv.Error, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"data.name: got {path}, which cannot be read: {error}") from error


def _parquet_tables(folder: Path, used: Used) -> Mapping[str, Any]:
    """Raises ValueError for files that cannot be read, or that refer to images outside of the folder."""
    # `datasets` treats names as patterns
    patterns = {
        split: [escape(str(folder / path)) for path in paths] for split, paths in used.items()
    }
    try:
        tables: Any = datasets.load_dataset("parquet", data_files=patterns)
    except Exception as error:  # bad files raise errors of any type
        cause = error.__cause__ or error
        raise ValueError(
            f"data.name: got {folder}, expected images or parquet files that can be read: "
            f"{type(cause).__name__}: {cause}"
        ) from error
    for table in tables.values():
        for field in table.data.schema:
            if pa.types.is_struct(field.type) and {"bytes", "path"} <= {x.name for x in field.type}:
                column = table.data.column(field.name)
                alone = pc.struct_field(column, "bytes").is_null()
                for path in filter(None, pc.struct_field(column, "path").filter(alone).to_pylist()):
                    if not Path(path).resolve().is_relative_to(folder):
                        raise ValueError(
                            f"data.name: got {folder}, which refers to {path}, expected images inside of it"
                        )
    return tables
