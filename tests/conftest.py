"""One thread per process, as the tests' tensors are small; no browser tests where there is no browser; proofs."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
from programs import missing_programs

# a shell in the background has SIGINT ignored, and nohup SIGHUP; the command line would respect that
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, help="number of trials of each proof (tests/proofs)")
    parser.addoption("--record", type=Path, help="folder for the outcomes of proofs: docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a browser where none is installed, but not in CI, where they fail."""
    missing = missing_programs()
    if missing and os.environ.get("CI") != "true":
        for item in items:
            if "browser" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish folders without figures, which take most of the time; test_door.py has them."""
    monkeypatch.setattr("sa_zoo.commands.finish.figure_files", lambda opened: {})
