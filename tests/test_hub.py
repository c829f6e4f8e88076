"""Publishing against a real HTTP server with the real client: the whole road, and every way it can break."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_routes import Repository
from hub_server import TOKEN, Fault, HubServer
from huggingface_hub import ModelCard, constants
from model_folders import make_run

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.opened import open_folder
from sa_zoo.interchange.transformers_export import transformers_files
from sa_zoo.publishing import remote
from sa_zoo.publishing.card import published_card, write_card
from sa_zoo.publishing.folder import PUBLISHED, without_paths
from sa_zoo.publishing.hub import publish
from sa_zoo.publishing.remote import Refused

# The client sends LFS files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

REPO = "you/test-vit"
CREATE, COMMIT, TAG = (
    "POST /api/repos/create",
    "POST /api/models/.*/commit/",
    "POST /api/models/.*/tag/",
)
INFO, REFS = "GET /api/models/you/test-vit$", "GET /api/models/.*/refs"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A small timm model as a run leaves it, with things next to it that must not be published."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "test_vit", "test_vit", num_classes=7)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "state.safetensors").write_bytes(b"large")
    (folder / "training_args.bin").write_bytes(b"\x80\x02a pickle with " + TOKEN.encode())
    return folder


@pytest.fixture
def run(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run, tmp_path / "test_vit"))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02))
    yield server
    server.shutdown()
    server.server_close()


def send(folder, repo_id=REPO, **arguments):
    return publish(open_folder(folder), repo_id, **arguments)


def published(hub, name=REPO):
    """Path -> bytes on the main branch, without the Hub's own file."""
    repository = hub.repositories[name]
    files = dict(repository.commits[repository.head])
    del files[".gitattributes"]
    return files


def tags(hub):
    return hub.repositories[REPO].tags


def test_the_whole_road_is_one_commit_and_a_tag_on_it(hub, run):
    commit = send(run, tag="v1")
    repository = hub.repositories[REPO]
    assert repository.tags == {"v1": commit} and repository.head == commit
    assert hub.count("POST .*/commit/") == 1
    names = ["config.json", "history.jsonl", "metrics.json", "model.safetensors", "train.toml"]
    expected = {name: (run / name).read_bytes() for name in names}
    expected["README.md"] = published_card(open_folder(run), REPO).encode()
    listed = json.loads(published(hub)["sa_zoo.json"])["files"]
    assert {name: digests["sha256"] for name, digests in listed.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in expected.items()
    }
    assert published(hub) == expected | {"sa_zoo.json": published(hub)["sa_zoo.json"]}
    before = hub.writes()
    send(run, tag="v1")
    assert hub.writes() == before, "nothing to do"


SPACE = "you/attention"
SPACE_FILES = {"README.md", "index.html", PUBLISHED}


@pytest.fixture
def explored(run):
    """The run with an explorer."""
    (run / "explorer.html").write_text("<p>a page")
    return run


@pytest.mark.parametrize("init", ["/home/jane/net", "local-dir:clients/net"])
def test_no_path_of_this_machine_is_published(hub, run, init):
    recipe = f'[model]\nname = "test_vit"\ninit = "{init}"\n[data]\nname = "clients/pictures"\n'
    (run / "train.toml").write_text(recipe)
    write_card(open_folder(run))
    send(run)
    sent = b"".join(published(hub).values())
    assert b"jane" not in sent and b"clients" not in sent
    assert (run / "train.toml").read_text() == recipe, "the run can be resumed"
    command = "train.toml --set data.name=path/to/images --set model.init=path/to/model"
    assert command in published(hub)["README.md"].decode()


def test_a_titled_data_set_of_the_hub_keeps_its_name():
    recipe = '[data]\nname = "them/pictures"\nrevision = "v1"\ntitle = "Pictures"\n'
    assert without_paths(recipe, "Pictures") == recipe


def test_the_explorer_becomes_a_space_to_which_the_card_leads(hub, explored):
    send(explored, tag="v1")
    send(explored, tag="v2", space=SPACE)
    files = published(hub, f"spaces/{SPACE}")
    assert files.keys() == SPACE_FILES, "without the Hub's example"
    assert files["index.html"] == b"<p>a page"
    metadata = ModelCard(files["README.md"].decode()).data.to_dict()
    assert (metadata["sdk"], metadata["models"]) == ("static", [REPO])
    assert f"({hub.url}/spaces/{SPACE})" in published(hub)["README.md"].decode()
    assert f"({hub.url}/{REPO})" in files["README.md"].decode()
    before = hub.writes()
    send(explored, tag="v2", space=SPACE)
    assert hub.writes() == before, "nothing to do"
    (explored / "explorer.html").unlink()
    with pytest.raises(ValueError, match=r"without explorer\.html"):
        send(explored, space=SPACE)


@pytest.mark.parametrize("theirs", ["spaces/them/attention", "them/test-vit"])
@pytest.mark.parametrize("there", [False, True])
def test_if_one_repository_is_of_somebody_else_nothing_is_published(hub, explored, theirs, there):
    if there:
        hub.repositories[theirs] = Repository(private=False)
        hub.repositories[theirs].commit({"README.md": b"theirs"})
    space, repo_id = (theirs[7:], REPO) if "spaces" in theirs else (SPACE, theirs)
    with pytest.raises(PermissionError):
        send(explored, repo_id, tag="v1", space=space, merge=True)
    assert hub.count("POST .*/commit/") == hub.count(TAG) == 0


def test_private_means_private_of_the_model_and_its_space(hub, explored):
    send(explored, private=True, space=SPACE)
    repositories = hub.repositories
    assert repositories.keys() == {REPO, f"spaces/{SPACE}"}
    assert all(repository.private for repository in repositories.values())
    for public in repositories:  # is no place for something private
        repositories[public].private = False
        (explored / "LICENSE").write_text(public)
        with pytest.raises(PermissionError, match="already public"):
            send(explored, private=True, space=SPACE)
        assert hub.count(COMMIT) == 1
        repositories[public].private = True


def test_publishing_and_a_dry_run_leave_the_folder_as_it_is_and_any_name_can_follow(
    hub, run, capsys
):
    write_card(open_folder(run))
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    assert send(run, private=True, tag="v1", dry_run=True) is None
    printed = capsys.readouterr().out
    assert hub.log == []
    assert all(part in printed for part in ("model.safetensors", REPO, "private", "v1"))
    assert "not published: checkpoints, training_args.bin" in printed
    send(run, "you/first")
    send(run, "you/second", tag="v1")
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before
    for repo_id in ("you/first", "you/second"):
        assert published(hub, repo_id)["README.md"].decode().count(repo_id) == 3


@pytest.mark.parametrize("kind", ["drop", "lose"])
def test_every_step_survives_a_broken_connection_and_nothing_happens_twice(hub, run, kind):
    hub.faults = [Fault(step, kind) for step in (CREATE, INFO, REFS, COMMIT, TAG)]
    hub.faults.append(Fault("PUT /lfs/", "drop"))
    hub.faults.append(Fault("GET .*/resolve/.*/model.safetensors", "cut"))
    commit = send(run, tag="v1")
    assert tags(hub) == {"v1": commit} and len(hub.repositories[REPO].commits) == 2
    assert not any(fault.times for fault in hub.faults)


@pytest.mark.parametrize(
    ("asked", "waited"),
    [("0", 0.5), ("7", 7.0), ("60", 60.0), ("next week", 0.5), ("3600", None)],
)
def test_a_busy_hub_is_asked_again_when_it_says_unless_that_is_too_long(
    hub, monkeypatch, asked, waited
):
    pauses = []
    monkeypatch.setattr(remote, "WAITS", (0.5,))
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    hub.faults = [Fault(REFS, 429, headers={"Retry-After": asked})]
    remote.Remote(REPO, hub.url).create(False)
    if waited is None:
        with pytest.raises(ConnectionError, match="too many requests"):
            remote.Remote(REPO, hub.url).tags()
    else:
        assert remote.Remote(REPO, hub.url).tags() == {}
    assert pauses == ([waited] if waited else [])


@pytest.mark.parametrize(
    "step",
    [
        "GET /api/spaces/.*/tree",  # a Space with the Hub's example
        "POST /api/spaces/.*/commit",
        "GET /spaces/",
        "POST .*/preupload/",
        "PUT /lfs/",
        COMMIT,
        f"GET /{REPO}/resolve/",
        TAG,
    ],
)
def test_an_interruption_at_any_step_leaves_no_tag_and_the_next_run_finishes(hub, explored, step):
    hub.faults = [Fault(CREATE, "lose"), Fault(step, 400)]
    with pytest.raises(OSError):
        send(explored, tag="v1", space=SPACE)
    assert tags(hub) == {}
    commit = send(explored, tag="v1", space=SPACE)
    assert tags(hub) == {"v1": commit} and len(hub.repositories[REPO].commits) == 2
    files = published(hub, f"spaces/{SPACE}")
    assert files.keys() == SPACE_FILES, "without the Hub's example"


@pytest.mark.parametrize("name", ["model.safetensors", "index.html"])
def test_a_flipped_bit_on_download_gets_no_tag(hub, explored, name):
    hub.faults = [Fault(f"GET .*/resolve/.*/{name}", "flip")]
    with pytest.raises(Refused, match=f"returned {name} with other bytes"):
        send(explored, tag="v1", space=SPACE)
    assert tags(hub) == {}
    commit = send(explored, tag="v1", space=SPACE)
    assert tags(hub) == {"v1": commit}


def test_somebody_else_committing_in_between_is_a_conflict_and_not_an_overwrite(hub, run):
    theirs = {"theirs.txt": b"mine too", ".gitattributes": b""}
    hub.before[COMMIT] = lambda: hub.repositories[REPO].commit(theirs)
    with pytest.raises(Refused, match="somebody else changed you/test-vit meanwhile"):
        send(run, tag="v1")
    assert published(hub) == {"theirs.txt": b"mine too"} and tags(hub) == {}


def test_somebody_else_committing_before_the_attempt_is_noticed_too(hub, run):
    send(run)
    hub.before[f"GET /api/models/{REPO}/tree/"] = lambda: hub.repositories[REPO].commit(
        {"theirs.txt": b"1"}
    )
    (run / "LICENSE").write_text("Apache License")
    hub.log.clear()
    with pytest.raises(Refused, match=r"theirs\.txt"):
        send(run, tag="v1")
    assert hub.count(COMMIT) == 0 and tags(hub) == {}


def other_work(hub, files):
    """A repository that somebody filled without this package."""
    hub.repositories[REPO] = Repository(private=False)
    hub.repositories[REPO].commit({".gitattributes": b""} | files)
    return hub.repositories[REPO]


@pytest.mark.parametrize(
    "theirs",
    [
        {"README.md": b"# Years of work\n", "weights/model.ckpt": b"w"},
        {"sa_zoo.json": b'{"files": [1]}'},
    ],
)
def test_a_repository_with_other_work_is_listed_and_left_alone(hub, explored, theirs):
    repository = other_work(hub, theirs)
    with pytest.raises(Refused, match=f"holds {', '.join(theirs)}, expected .*--merge"):
        send(explored, tag="v1", space=SPACE)
    assert published(hub) == theirs and len(repository.commits) == 1 and repository.tags == {}
    assert hub.writes() == [CREATE] and hub.objects == {}, "the Space, which is still empty"


def test_merging_into_other_work_replaces_files_of_the_same_name_and_keeps_the_rest(hub, run):
    repository = other_work(hub, {"README.md": b"# Mine\n", "weights/model.ckpt": b"w"})
    commit = send(run, tag="v1", merge=True)
    assert repository.tags == {"v1": commit}
    assert b"# Mine" not in published(hub)["README.md"]
    (run / "LICENSE").write_text("Apache License")  # from now on it is known what is whose
    send(run)
    assert "LICENSE" in published(hub)
    (run / "LICENSE").unlink()
    send(run)
    assert published(hub)["weights/model.ckpt"] == b"w" and "LICENSE" not in published(hub)


def test_a_file_edited_on_the_hub_is_neither_overwritten_nor_removed(hub, run):
    (run / "LICENSE").write_text("Apache License")
    send(run)
    repository = hub.repositories[REPO]
    theirs = {"LICENSE": b"MIT", "notes.txt": b"n"}
    repository.commit(repository.commits[repository.head] | theirs)
    with pytest.raises(Refused, match=r"which holds LICENSE, expected"):
        send(run)
    (run / "LICENSE").unlink()
    (run / "report.md").write_text("a report")
    send(run)
    assert theirs.items() <= published(hub).items() and "report.md" in published(hub)
    (run / "LICENSE").write_text("Apache License")
    send(run, merge=True)
    assert published(hub)["notes.txt"] == b"n" and published(hub)["LICENSE"] == b"Apache License"


def test_a_tag_never_moves_to_other_contents_nor_from_others(hub, run):
    first = send(run, tag="v1")
    (run / "train.toml").write_text('[model]\nname = "test_vit"\n[train]\nseed = 7\n')
    write_card(open_folder(run))
    with pytest.raises(ValueError, match=r"got tag v1, .*train\.toml: other bytes"):
        send(run, tag="v1")
    hub.before[TAG] = lambda: hub.repositories[REPO].tags.update(v2="0" * 40)
    with pytest.raises(Refused, match="collides"):
        send(run, tag="v2")
    assert tags(hub) == {"v1": first, "v2": "0" * 40}


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, PermissionError, "HF_TOKEN"),
        (403, PermissionError, "choose a --repo-id of your own"),
        (404, FileNotFoundError, "check --repo-id you/test-vit and HF_ENDPOINT"),
        (409, Refused, "somebody else changed"),
        (418, Refused, "the Hub refuses .*418.*as the test wished for Bearer <token>"),
        (503, ConnectionError, "run this again later"),
    ],
)
def test_each_refusal_says_what_to_do_and_only_a_busy_hub_is_asked_again(
    hub, run, status, error, words
):
    hub.faults = [Fault(REFS, status, times=99)]
    with pytest.raises(error, match=f"could not read the tags at .*{words}") as raised:
        send(run, tag="v1")
    assert TOKEN not in str(raised.value)
    assert hub.count(REFS) == (3 if status == 503 else 1)


@pytest.mark.parametrize("token", ["", "hf_ümlaut"])
def test_without_a_usable_token_nothing_is_asked(hub, run, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PermissionError, match="no usable token: set HF_TOKEN"):
        send(run)
    assert hub.log == []


@pytest.mark.parametrize(
    ("repo_id", "tag"),
    [("test-vit", "v1"), ("you/..", "v1"), ("you/a/b", "v1"), ("you/a b", "v1"), (REPO, "v 1")],
)
def test_names_that_no_hub_takes_are_refused(hub, run, repo_id, tag):
    with pytest.raises(ValueError):
        send(run, repo_id, tag=tag)
    assert hub.log == []


def test_the_cards_code_runs_against_what_was_published(hub, tmp_path):
    run = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar")
    opened = open_folder(run)
    opened.with_files(transformers_files(opened))
    send(run)
    with_timm, with_transformers, without_package = re.findall(
        r"```python\n(.*?)```", published(hub)["README.md"].decode(), re.DOTALL
    )
    # The last block comes first: after it the package is imported.
    code = [
        without_package,
        "import sys",
        "assert 'sa_zoo' not in sys.modules and type(model).__name__ == 'SAForImageClassification'",
        with_timm,
        with_transformers,
        "assert probabilities.shape == (1, 10) and len(labels) == 5",
        "assert abs(labels[0]['score'] - probabilities.max()) < 1e-4",
    ]
    hub.log.clear()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(code)], env=environment, check=True)
    assert hub.count(f"GET /{REPO}/resolve/.*/model.safetensors") == 1
