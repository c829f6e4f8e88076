"""One thread per process, as the tests' tensors are small; no browser tests where there is no browser; proofs."""

import os
import shutil
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, help="number of trials of each proof (tests/proofs)")
    parser.addoption("--record", type=Path, help="folder for the outcomes of proofs: docs")


def missing_programs() -> str:
    """What a machine without a browser has to install; empty if it has one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not found; apt-get install chromium chromium-driver"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a browser where none is installed, but not in CI, where they fail."""
    missing = missing_programs()
    if missing and os.environ.get("CI") != "true":
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=missing))
