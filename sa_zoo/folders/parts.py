"""The files of a model folder to list in its manifest, to publish and to copy."""

from pathlib import Path

from sa_zoo.folders.write import check_inside

# Everything else (optimizer state, logs, pickles) stays on this machine.
PARTS = (
    "config.json",
    "metrics.json",
    "model.safetensors",
    "README.md",
    "LICENSE",
    "report.md",
    "preprocessor_config.json",
    "*.py",
    "train.toml",
    "history.jsonl",
    "heads.safetensors",
    "attention.safetensors",
    "check.json",
    "results/*.json",
    "figures/*.png",
    "explorer.html",
)
CHANGING = {"README.md", "metrics.json"}  # may be rewritten, so not in the manifest


def parts_of(folder: Path) -> list[str]:
    """The names of all PARTS in a folder. Raises ValueError for a link to a file outside the folder."""
    paths = [path for part in PARTS for path in folder.glob(part) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in sorted(paths)]
    for name in names:
        check_inside(folder, name)
    return names
