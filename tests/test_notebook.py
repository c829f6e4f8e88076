"""The notebook of examples/ runs from start to end, offline, and is committed with its outputs.

jupyter execute --inplace --NotebookClient.record_timing=False examples/attention_as_convolution.ipynb
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "attention_as_convolution.ipynb"


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def kinds(cell) -> list[list[str]]:
    """The formats of what a cell shows beside text that it prints."""
    return [sorted(output.data) for output in cell.outputs if "data" in output]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the messaging library below nbclient
def test_it_runs_and_shows_what_is_committed(committed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    executed = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(executed, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    shown = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [kinds(cell) for cell in cells] == [kinds(cell) for cell in shown]
    assert printed(cells[-1]) == printed(shown[-1]) == "True\n"


def test_it_is_small_and_without_warnings(committed):
    assert NOTEBOOK.stat().st_size < 500_000
    for cell in committed.cells:
        outputs = cell.get("outputs", [])
        assert all(output.get("name") != "stderr" for output in outputs), cell.source
