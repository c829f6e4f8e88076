"""What is in a model folder: the files that its manifest covers, and that are published and copied."""

from pathlib import Path

from sa_zoo.folders.write import check_inside

# Everything that is not here (optimizer state, logs, pickles) stays on this machine.
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
CHANGING = {"README.md", "metrics.json"}  # may be written again, so the manifest leaves them out


def parts_of(folder: Path) -> list[str]:
    """The names of all PARTS that a folder has. Raises ValueError for a link that leads elsewhere."""
    paths = [path for part in PARTS for path in folder.glob(part) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in sorted(paths)]
    for name in names:
        check_inside(folder, name)
    return names
