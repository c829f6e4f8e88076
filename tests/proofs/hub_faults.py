"""One publication over an unreliable connection to a Hub that others use, too: random faults, then what must hold."""

import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hub_routes import Repository
from hub_server import Fault, HubServer

from sa_zoo.folders.opened import open_folder
from sa_zoo.publishing.card import published_card
from sa_zoo.publishing.folder import read_manifest, with_list, without_paths
from sa_zoo.publishing.hub import publish

REPO = "you/test-vit"
STEPS = (
    "POST /api/repos/create",
    f"GET /api/models/{REPO}$",
    "GET /api/models/.*/refs",
    "GET /api/models/.*/tree/",
    "POST .*/preupload/",
    "POST .*/batch",
    "PUT /lfs/",
    "POST .*/verify",
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
        self.plan: list[
            tuple[str, Fault | None, int]
        ] = []  # kind, fault, how often it is to happen
        if first is not None:
            repository = self.repositories[REPO] = Repository(private=False)
            repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            repository.tags["v1"] = repository.commit(
                {".gitattributes": b"*.safetensors filter=lfs\n"} | first
            )
        for kind in chance.sample(list(KINDS), chance.choice((1, 1, 2, 3))):
            step = STEPS[-1] if kind.startswith("byte") else chance.choice(STEPS)
            if KINDS[kind]:
                times = chance.choice((1, 1, 2, 3))
                fault = Fault(
                    step,
                    chance.choice(KINDS[kind]),
                    times,
                    {"Retry-After": "0"},
                    at=chance.random(),
                )
                self.faults.append(fault)
                self.plan.append((kind, fault, times))
            else:
                parts = 1 if kind.startswith("another commit") else 3
                for part, where in enumerate(chance.sample(STEPS[1:], parts)):
                    self.before[where] = lambda name=f"theirs-{part}.txt": (
                        self.commit_of_somebody_else(name)
                    )
                self.plan.append((kind, None, 0))

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


def manifest_of(run: Path) -> Files:
    opened = open_folder(run)
    recipe = without_paths((run / "train.toml").read_text(), opened.metrics.data)
    published = {"README.md": published_card(opened, REPO), "train.toml": recipe}
    manifest = read_manifest(run) | {name: text.encode() for name, text in published.items()}
    return dict(sorted(manifest.items()))


def bytes_of(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def trial(seed: int, finished_run: Path, place: Path) -> Trial:
    """Publish a second revision, or a first one, through faults that `seed` chooses; then, if that fails, without."""
    chance = random.Random(seed)
    run = Path(shutil.copytree(finished_run, place / f"run-{seed}"))
    first = with_list(manifest_of(run)) if chance.random() < 0.7 else None
    (run / "LICENSE").write_text(f"licence {seed}\n")
    second, local = with_list(manifest_of(run)), bytes_of(run)
    hub = Hub(chance, first)
    try:
        outcomes = [attempt(run, hub.url)]
        broken = kept(hub, first, second)
        if outcomes[0].startswith("traceback"):
            broken.append(outcomes[0])
        kinds = hub.happened()
        hub.faults, hub.before = [], {}
        if outcomes[0] != "published":
            outcomes.append(attempt(run, hub.url))
            broken += kept(hub, first, second)
        refused = first is None and bool(hub.theirs) and outcomes[-1].startswith("Refused")
        if outcomes[-1] != "published" and not refused:
            broken.append(f"the second attempt, without faults: {outcomes[-1]}")
        if outcomes[-1] == "published" and "v2" not in hub.repositories[REPO].tags:
            broken.append("published, but not tagged")
    finally:
        hub.shutdown()
        hub.server_close()
    if bytes_of(run) != local:
        broken.append("local files changed")
    shutil.rmtree(run)
    return Trial(kinds, outcomes[0].partition(":")[0], broken)


def attempt(run: Path, url: str) -> str:
    try:
        with mock.patch.dict(os.environ, HF_ENDPOINT=url):
            publish(open_folder(run), REPO, tag="v2")
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # a traceback for a user
        return f"traceback: {type(error).__name__}: {error}"
    return "published"


def kept(hub: Hub, first: Files | None, second: Files) -> list[str]:
    """Broken promises about the repository."""
    repository = hub.repositories.get(REPO)
    if repository is None:
        return []
    broken = []
    revisions = [first or {}, second]
    head = {
        name: content
        for name, content in repository.commits[repository.head].items()
        if name != ".gitattributes"
    }
    ours = {name: content for name, content in head.items() if not re.match("theirs", name)}
    if ours not in revisions:
        broken.append(f"main holds neither the old nor the new revision: {sorted(ours)}")
    if {name: content for name, content in head.items() if re.match("theirs", name)} != hub.theirs:
        broken.append("a commit of somebody else was undone")
    for tag, commit in repository.tags.items():
        files = repository.commits[commit].items()
        tagged = {
            name: content
            for name, content in files
            if name != ".gitattributes" and not re.match("theirs", name)
        }
        if tagged != revisions[0 if tag == "v1" else 1]:
            broken.append(f"tag {tag} is on something else")
    return broken
