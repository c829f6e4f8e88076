"""One publication over an unreliable connection to a Hub that others use, too: random faults, then what must hold."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_routes import Repository
from hub_server import TOKEN, Fault, HubServer
from huggingface_hub import constants
from model_folders import make_run

import sa_zoo
from sa_zoo.publishing import remote
from sa_zoo.publishing.hub import manifest_of

REPO = "you/test-vit"
STEPS = (
    "POST /api/repos/create",
    f"GET /api/models/{REPO}$",
    "GET /api/models/.*/refs",
    "GET /api/models/.*/tree/",
    "POST .*/preupload/",
    "POST .*/batch",
    "PUT /lfs/",
    "POST /api/models/.*/commit/",
    "POST /api/models/.*/tag/",
    "(GET|HEAD) .*/resolve/",
)
KINDS: dict[str, tuple[str | int, ...]] = {
    "connection dropped": ("drop",),
    "answer lost": ("lose",),
    "answer cut at byte n": ("cut",),
    "byte of a download flipped": ("flip",),
    "slow answer": ("slow",),
    "5xx": (500, 502, 503, 504),
    "429": (429,),
    "4xx": (400, 403, 409, 412),
    "another commit in between": (),
    "another upload, split over several commits": (),
}
ATTRIBUTES = {".gitattributes": b"*.safetensors filter=lfs\n"}
Files = dict[str, bytes]


@dataclass
class Trial:
    kinds: list[str]  # of the faults that happened
    outcome: str  # of the first attempt: "published", or the kind of error that it ended with
    broken: list[str]  # promises that were not kept; empty if all is well


class Hub(HubServer):
    """A Hub with the first revision of a folder, on which a random plan of faults lies."""

    def __init__(self, chance: random.Random, first: Files | None) -> None:
        super().__init__()
        self.theirs: Files = {}
        self.plan: list[tuple[str, Fault | None, int]] = []  # kind, fault, how often
        if first is not None:
            repository = self.repositories[REPO] = Repository(private=False)
            repository.commit(ATTRIBUTES)
            repository.tags["v1"] = repository.commit(ATTRIBUTES | first)
        for kind in chance.sample(list(KINDS), chance.choice((1, 1, 2, 3))):
            step = STEPS[-1] if kind.startswith("byte") else chance.choice(STEPS)
            times = chance.choice((1, 1, 2, 3))
            fault = None
            if KINDS[kind]:
                again = {"Retry-After": "0"}
                fault = Fault(step, chance.choice(KINDS[kind]), times, again, at=chance.random())
                self.faults.append(fault)
            else:
                parts = 1 if kind.startswith("another commit") else 3
                for part, where in enumerate(chance.sample(STEPS[1:], parts)):
                    name = f"theirs-{part}.txt"
                    self.before[where] = lambda name=name: self.commit_of_somebody_else(name)
            self.plan.append((kind, fault, times))

    def commit_of_somebody_else(self, name: str) -> None:
        if repository := self.repositories.get(REPO):
            self.theirs[name] = b"theirs"
            repository.commit(repository.commits[repository.head] | {name: b"theirs"})

    def happened(self) -> list[str]:
        """Kinds of the faults that did happen."""
        return sorted(
            kind
            for kind, fault, times in self.plan
            if (fault.times < times if fault else self.theirs)
        )

    def broken(self, first: Files | None, second: Files) -> list[str]:
        """Broken promises about the repository."""
        repository = self.repositories.get(REPO)
        if repository is None:
            return []

        def ours(commit: str) -> Files:
            files = repository.commits[commit].items()
            return {
                name: content for name, content in files if not name.startswith((".g", "theirs"))
            }

        broken = []
        head = repository.commits[repository.head]
        if ours(repository.head) not in (first or {}, second):
            broken.append(f"main holds neither the old nor the new revision: {sorted(head)}")
        if {name: head[name] for name in head if name.startswith("theirs")} != self.theirs:
            broken.append("a commit of somebody else was undone")
        for tag, commit in repository.tags.items():
            if ours(commit) != (first if tag == "v1" else second):
                broken.append(f"tag {tag} is on something else")
        return broken


def trial(seed: int, finished_run: Path, place: Path, monkeypatch) -> Trial:
    """Publish a second revision, or a first one, through faults that `seed` chooses; then, if that fails, without."""
    chance = random.Random(seed)
    run = Path(shutil.copytree(finished_run, place / f"run-{seed}"))
    first = manifest_of(sa_zoo.open(run), REPO) if chance.random() < 0.7 else None
    (run / "LICENSE").write_text(f"licence {seed}\n")
    second = manifest_of(sa_zoo.open(run), REPO)
    local = {path: path.read_bytes() for path in run.iterdir()}
    hub = Hub(chance, first)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    try:
        outcome = last = attempt(run)
        broken = hub.broken(first, second)
        kinds = hub.happened()
        hub.faults, hub.before = [], {}
        if outcome != "published":
            last = attempt(run)
            broken += hub.broken(first, second)
        refused = first is None and bool(hub.theirs) and last.startswith("Refused")
        if last != "published" and not refused:
            broken.append(f"the second attempt, without faults: {last}")
        if last == "published" and "v2" not in hub.repositories[REPO].tags:
            broken.append("published, but not tagged")
    finally:
        hub.shutdown()
        hub.server_close()
    if {path: path.read_bytes() for path in run.iterdir()} != local:
        broken.append("local files changed")
    if outcome.startswith("traceback"):
        broken.append(outcome)
    shutil.rmtree(run)
    return Trial(kinds, outcome.partition(":")[0], broken)


def attempt(run: Path) -> str:
    try:
        sa_zoo.publish(run, REPO, tag="v2")
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # a traceback for a user
        return f"traceback: {type(error).__name__}: {error}"
    return "published"


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
