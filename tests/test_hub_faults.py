"""A few of the random faults that scripts/prove_hub.py tries by the hundred."""

import pytest
from hub_faults import trial
from hub_server import TOKEN
from huggingface_hub import constants
from model_folders import make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.publishing import remote


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
def test_random_faults_leave_the_old_or_the_new_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02))
    finished = make_run(tmp_path / "test_vit", "test_vit", num_classes=7)
    met = set()
    for seed in (1, 2, 3, 4):
        result = trial(seed, finished, tmp_path)
        assert result.broken == [], (seed, result)
        met |= set(result.kinds)
    assert met
