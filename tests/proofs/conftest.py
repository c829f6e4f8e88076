"""Proofs: tests that break something on purpose, a few times in the suite, many times with --times.

    pytest tests/proofs -k kill --times 100 --record docs

tries 100 times and writes docs/reliability/kill.json, from which scripts/render.py renders docs/reliability.md.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from sa_zoo.training.environment import environment


class Proof:
    """Counts the outcomes of trials."""

    def __init__(self, times: int | None) -> None:
        self.times = times  # None in the suite
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.lost = 0

    def tried(self, kind: str, outcome: str, lost: object = None) -> None:
        """A trial; `lost` is the promise that was broken, if any."""
        if lost:
            self.lost += 1
            outcome = f"LOST: {lost}"
        self.outcomes[kind, outcome] += 1
        print(kind, outcome, flush=True)


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Iterator[Proof]:
    proof = Proof(request.config.getoption("times"))
    started = time.perf_counter()
    yield proof
    folder = request.config.getoption("record")
    if folder:
        name = request.function.__name__.removeprefix("test_")
        command = f"pytest tests/proofs -k {name} --times {proof.times} --record docs"
        details = [[*kind, times] for kind, times in sorted(proof.outcomes.items())]
        result = {
            "what": " ".join(request.function.__doc__.split()),
            "command": command,
            "tried": proof.outcomes.total(),
            "lost": proof.lost,
            "details": [[kind, times, outcome] for kind, outcome, times in details],
            "environment": environment(torch.device("cpu")),
            "seconds": round(time.perf_counter() - started, 1),
        }
        path = folder / "reliability" / f"{name}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    assert not proof.lost, proof.outcomes
