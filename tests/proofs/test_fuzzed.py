"""Fuzzing of everything that reads a file of somebody else."""

import os
import re
from pathlib import Path

import pytest
from fuzz_targets import CHANGES, TARGETS, load_changed
from hypothesis import given, settings

CORPUS = Path(__file__).parent / "corpus"
MEGABYTES = 4096  # of the whole process, libraries included; more is a finding


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_what_fuzzing_found_is_read_or_refused(name):
    for path in sorted((CORPUS / name).iterdir()):
        TARGETS[name](path.read_bytes())


def test_random_values_in_a_configuration_are_loaded_or_refused():
    settings(max_examples=60, derandomize=True, database=None, deadline=None)(
        given(CHANGES)(load_changed)
    )()


def test_fuzz(proof, tmp_path):
    """Coverage-guided fuzzing of the readers of configurations, weights, recipes, metrics and images, and of loading a
    network with random values in config.json: an input is read or refused with a message. No traceback, no more than
    4096 MB, a minute at most."""
    if not proof.times:
        pytest.skip("--times is a number of seconds per reader")
    atheris = pytest.importorskip("atheris", reason="pip install atheris")
    atheris.instrument_all()
    for name, target in TARGETS.items():
        log = tmp_path / f"{name}.log"
        known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
        (tmp_path / name).mkdir()
        limits = [f"-max_total_time={proof.times}", f"-rss_limit_mb={MEGABYTES}", "-timeout=60"]
        options = [str(tmp_path / name), *known, *limits, "-print_final_stats=1"]
        child = os.fork()
        if child == 0:  # libFuzzer ends its process
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
            atheris.Setup(["fuzz", *options], lambda data, run=target: run(data) and None)
            atheris.Fuzz()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        text = log.read_text(errors="replace")
        executed = int((re.findall(r"number_of_executed_units:\s+(\d+)", text) or ["0"])[-1])
        lost = (status or not executed) and text[-2000:]
        proof.tried(name, "read or refused", lost, times=executed)
