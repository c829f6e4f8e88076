"""The notebook of examples/ runs from start to end, offline, and is committed with its outputs.

jupyter execute --inplace examples/attention_as_convolution.ipynb
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "attention_as_convolution.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the messaging library below nbclient
def test_it_runs_and_shows_the_committed_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebooks = [nbformat.read(NOTEBOOK, as_version=4) for _ in range(2)]
    for cell in notebooks[0].cells:
        cell.source = cell.source.replace("epochs=4", "epochs=1")
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebooks[0], timeout=600, resources=resources).execute()
    executed, committed = (
        [
            [sorted(output.data) for output in cell.get("outputs", []) if "data" in output]
            for cell in book.cells
        ]
        for book in notebooks
    )
    assert executed == committed
    assert notebooks[0].cells[-1].outputs[0].text == "True\n"
