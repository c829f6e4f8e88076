"""Publishing through random faults, to a Hub in this process that the official client reaches by HTTP."""

import pytest
from hub_faults import trial
from hub_server import TOKEN
from huggingface_hub import constants
from model_folders import make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.publishing import remote


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
def test_hub(proof, tmp_path, monkeypatch):
    """Publish a folder to a Hub over HTTP through random faults; if that fails, again without. After each attempt main
    holds the old or the new revision completely, commits of others stay, tags are on complete revisions only, local
    files are unchanged; the second attempt finishes the job, or refuses a repository that others filled first."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02))
    finished = make_run(tmp_path / "test_vit", "test_vit", num_classes=7)
    met = 0
    for seed in range(1, 1 + (proof.times or 4)):
        result = trial(seed, finished, tmp_path, monkeypatch)
        kind = "several kinds at once" if len(result.kinds) > 1 else "".join(result.kinds)
        met += bool(kind)
        outcome = f"first attempt: {result.outcome}"
        proof.tried(kind or "no fault was met", outcome, result.broken)
    assert met
