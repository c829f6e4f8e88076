"""One thread per process, as the tests' tensors are small; no browser tests where there is no browser; proofs."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
from programs import missing_programs

# one of them at the end would keep one worker busy after the others
SLOW = ("test_train.py", "test_notebook.py", "test_readme.py", "test_docs.py")
# a shell in the background has SIGINT ignored, and nohup SIGHUP; the command line would respect that
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, help="number of trials of each proof (tests/proofs)")
    parser.addoption("--record", type=Path, help="folder for the outcomes of proofs: docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with slow files; skip tests that need a missing browser, but not in CI, where they fail."""
    items.sort(key=lambda item: item.path.name not in SLOW)
    missing = missing_programs()
    if missing and os.environ.get("CI") != "true":
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish folders without figures, which take most of the time; test_door.py has them."""
    monkeypatch.setattr("sa_zoo.commands.finish.figure_files", lambda opened: {})
