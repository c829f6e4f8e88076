"""Inputs that fuzzing found, and random configurations: read, or refused with a message."""

from pathlib import Path

import pytest
from fuzz_targets import CHANGES, TARGETS, load_changed
from hypothesis import given, settings

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_what_fuzzing_found_is_read_or_refused(name):
    for path in sorted((CORPUS / name).iterdir()):
        TARGETS[name](path.read_bytes())


def test_random_values_in_a_configuration_are_loaded_or_refused():
    settings(max_examples=60, derandomize=True, database=None, deadline=None)(
        given(CHANGES)(load_changed)
    )()
