"""Files and folders written completely or not at all, their checksums, and timm's two files.

timm and transformers load `model.safetensors` and `config.json` of a model folder. Training and conversion add other
files. All files are written here.
"""

import json
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

SUMS = "sha256.json"


def write_file(path: Path, content: bytes | str) -> Path:
    """Write a file atomically, unless its content is the same: even a power failure leaves the old or the new file.

    Raises OSError with the name of the file, for example on a full disk.
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a safetensors file, with the metadata of PyTorch."""
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return write_file(path, save(stored, {"format": "pt"}))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError for anything else."""
    return json_object(path.read_bytes(), str(path))


def json_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError with the name `source` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{source}: got a file that is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: got a {type(value).__name__}, expected a JSON object")
    return value


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Build a folder atomically: yields a temporary folder of this name, moved here if the block succeeds.

    Raises FileExistsError if `folder` has no name, or exists and is not an empty folder.
    """
    if not folder.name or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise FileExistsError(f"out: got {folder}, expected the name of a new or an empty folder")
    temporary = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
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
    """Flush the entries of a folder to disk; otherwise a power failure may undo a rename."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the sha256 of these complete files into a manifest."""
    write_json(
        folder / SUMS, {name: sha256((folder / name).read_bytes()).hexdigest() for name in names}
    )


def damage(folder: Path, *required: str, among: Container[str] | None = None) -> str:
    """The first fault in the manifest of a folder or its files (only those in `among`, if given); empty if none.

    The manifest has to name the files `required`, and may name only files inside the folder.
    """
    try:
        sums = read_json(folder / SUMS)
        missing = [name for name in required if name not in sums]
        if missing:
            return f"{folder / SUMS} lacks {', '.join(missing)}"
        for name, expected in sums.items():
            if among and name not in among:
                continue
            check_inside(folder, name)
            if not (folder / name).is_file():  # an untrusted manifest may name a device
                return f"{folder / name} is not there"
            if sha256((folder / name).read_bytes()).hexdigest() != expected:
                return f"{folder / name} does not match its sha256 in {SUMS}"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def check_sums(folder: Path, among: Container[str] | None = None) -> None:
    """Raise ValueError if the folder has a manifest and one of its files (in `among`, if given) is damaged."""
    if not (folder / SUMS).exists():
        return
    found = damage(folder, among=among)
    if found:
        raise ValueError(
            f"got a damaged folder: {found}; if the file was changed on purpose, remove {SUMS}"
        )


def check_inside(folder: Path, name: str) -> None:
    """Raise ValueError if folder/name is a link out of the folder: nothing is read or written through it."""
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
    """Write the two files for timm; the configs are those of `save_config_for_hf`.

    Without `model_config`, classes keep the names in the pretrained_cfg if their number is that of the classes.
    """
    write_tensors(folder / "model.safetensors", model.state_dict())
    if model_config is None:
        cfg: Any = model.pretrained_cfg
        model_config = {}
        if len(cfg.get("label_names") or ()) == model.num_classes:
            model_config = {key: cfg.get(key) for key in ("label_names", "label_descriptions")}
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "config.json"
        save_config_for_hf(model, str(path), model_config, data_config=data_config)
        config = read_json(path)
    # transformers refuses num_classes there; timm reads the outer one
    config.get("model_args", {}).pop("num_classes", None)
    write_json(folder / "config.json", config)
