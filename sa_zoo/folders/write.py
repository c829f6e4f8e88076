"""Files and folders written completely or not at all, their checksums, and timm's two files.

A model folder holds `model.safetensors` and `config.json`, which timm and transformers load, and whatever else
training or conversion left there. All its files are written here.
"""

import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from timm.models._hub import save_config_for_hf
from torch import nn

SUMS = "sha256.json"


def write_file(path: Path, content: bytes | str) -> Path:
    """Write a file, unless it has this content, atomically: even a power failure leaves the old one or the new one.

    Raises OSError that names the file, as on a full disk.
    """
    if isinstance(content, str):
        content = content.encode()
    if path.is_file() and path.read_bytes() == content:
        return path
    temporary = path.with_name(f".{path.name}.{os.getpid()}.incomplete")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)
    return path


def write_json(path: Path, value: Any) -> Path:
    return write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError for a file that holds anything else."""
    return json_object(path.read_bytes(), str(path))


def json_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text`; `source` is named in the ValueError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise ValueError(f"{source}: got a file that is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: got a {type(value).__name__}, expected a JSON object")
    return value


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Build a folder atomically: yields one of the same name elsewhere, moved here if the block raises nothing.

    Raises FileExistsError if `folder` exists and is not an empty folder, or has no name.
    """
    if not folder.name or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise FileExistsError(f"out: got {folder}, expected the name of a new or an empty folder")
    temporary = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    new = temporary / folder.name
    new.mkdir(parents=True)
    try:
        yield new
        _sync(new)
        if folder.exists():
            folder.rmdir()  # Windows cannot replace it
        new.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Write the entries of a folder to the disk: without it, a power failure may undo a rename."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the sha256 of these files into a manifest, once the files themselves are complete."""
    write_json(
        folder / SUMS, {name: sha256((folder / name).read_bytes()).hexdigest() for name in names}
    )


def damage(folder: Path, *required: str, among: Container[str] | None = None) -> str:
    """What is wrong with the manifest of a folder, or with its files, or those `among` them; empty if nothing.

    The manifest has to name the files `required`, and may name files inside of the folder only.
    """
    try:
        sums = read_json(folder / SUMS)
        missing = [name for name in required if name not in sums]
        if missing:
            return f"{folder / SUMS} lacks {', '.join(missing)}"
        for name, expected in sums.items():
            if among and name not in among:
                continue
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{folder / SUMS} names {name}, which is not in the folder"
            if not (folder / name).is_file():  # a folder of somebody else may name a device
                return f"{folder / name} is not there"
            if sha256((folder / name).read_bytes()).hexdigest() != expected:
                return f"{folder / name} does not match its sha256 in {SUMS}"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_sums(folder: Path, among: Container[str] | None = None) -> None:
    """Raise ValueError if the folder has a manifest and a file in it, or one `among` them, is damaged."""
    if not (folder / SUMS).exists():
        return
    found = damage(folder, among=among)
    if found:
        raise ValueError(
            f"got a damaged folder: {found}; if the file was changed on purpose, remove {SUMS}"
        )


def check_inside(folder: Path, name: str) -> None:
    """Raise ValueError if folder/name is a link that leads out of the folder: nothing is read or written through it."""
    target = (folder / name).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise ValueError(
            f"got {folder / name}, a link to {target}, expected a file or folder inside of {folder}"
        )


def write_timm_files(
    folder: Path,
    model: nn.Module,
    model_config: dict[str, Any] | None = None,
    data_config: dict[str, Any] | None = None,
) -> None:
    """Write the two files that timm loads; the configs are those of `save_config_for_hf`.

    Without `model_config`, the classes keep the names of where the network was loaded from, if it has as many classes.
    """
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    write_file(folder / "model.safetensors", save(weights, {"format": "pt"}))
    if model_config is None:
        cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
        model_config = {}
        if len(cfg.get("label_names") or ()) == model.num_classes:
            model_config = {key: cfg.get(key) for key in ("label_names", "label_descriptions")}
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "config.json"
        save_config_for_hf(model, str(path), model_config, data_config=data_config)
        config = read_json(path)
    # transformers refuses it there; timm reads the outer one
    config.get("model_args", {}).pop("num_classes", None)
    write_json(folder / "config.json", config)
