"""Publishing against a real HTTP server with the real client: the whole road, and every way it can break."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
from hub_routes import Repository
from hub_server import TOKEN, Fault, HubServer
from huggingface_hub import ModelCard, constants
from model_folders import make_run

import sa_zoo
from sa_zoo.publishing import folder, hub, remote
from sa_zoo.publishing.card import published_card, write_card
from sa_zoo.publishing.folder import PUBLISHED, check_loads, without_paths
from sa_zoo.publishing.remote import Refused, Remote
from sa_zoo.publishing.transformers_export import transformers_files

# The client sends LFS files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

REPO = "you/test-vit"
CREATE = "POST /api/repos/create"
COMMIT = "POST /api/models/.*/commit/"
TAG = "POST /api/models/.*/tag/"
INFO = "GET /api/models/you/test-vit$"
REFS = "GET /api/models/.*/refs"
SPACE = "you/attention"
SPACE_FILES = {"README.md", "index.html", PUBLISHED}


@pytest.fixture
def run(tmp_path):
    """A small timm model as a run leaves it, with things next to it that must not be published."""
    folder = make_run(tmp_path / "test_vit", "test_vit", num_classes=7)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "state.safetensors").write_bytes(b"large")
    (folder / "training_args.bin").write_bytes(b"\x80\x02a pickle with " + TOKEN.encode())
    (folder / "explorer.html").write_text("<p>a page")
    return folder


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub. Comparing both libraries takes most of the time, so that only tests about it do that."""
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02))
    for module in (folder, hub):
        monkeypatch.setattr(module, "check_loads", lambda *_, **__: None)
    yield server
    server.shutdown()
    server.server_close()


def published(server, name=REPO):
    """Path -> bytes on the main branch, without the Hub's own file."""
    repository = server.repositories[name]
    files = dict(repository.commits[repository.head])
    del files[".gitattributes"]
    return files


def other_work(server, files):
    """A repository that somebody filled without this package."""
    server.repositories[REPO] = Repository(private=False)
    server.repositories[REPO].commit({".gitattributes": b""} | files)
    return server.repositories[REPO]


def test_a_run_becomes_one_commit_with_a_tag_on_it(server, run, monkeypatch):
    loaded = []

    def check(*arguments, **where):
        loaded.append(check_loads(*arguments, **where).shape)

    monkeypatch.setattr(folder, "check_loads", check)
    monkeypatch.setattr(hub, "check_loads", check)
    commit = sa_zoo.publish(run, REPO, tag="v1")
    repository = server.repositories[REPO]
    assert repository.tags == {"v1": commit} and repository.head == commit
    assert server.count("POST .*/commit/") == 1
    assert loaded == 2 * [(2, 7)], "before it is sent and after it is downloaded"
    names = "config.json explorer.html history.jsonl metrics.json model.safetensors train.toml"
    expected = {name: (run / name).read_bytes() for name in names.split()}
    expected["README.md"] = published_card(sa_zoo.open(run), REPO).encode()
    files = published(server)
    listed = json.loads(files.pop("sa_zoo.json"))["files"]
    assert files == expected
    assert {name: digests["sha256"] for name, digests in listed.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in expected.items()
    }
    before = server.writes()
    assert sa_zoo.publish(run, REPO, tag="v1") == commit
    assert server.writes() == before, "nothing to do"


@pytest.mark.parametrize("init", ["/home/jane/net", "local-dir:clients/net"])
def test_no_path_of_this_machine_is_published(server, run, init):
    recipe = f'[model]\nname = "test_vit"\ninit = "{init}"\n[data]\nname = "clients/pictures"\n'
    (run / "train.toml").write_text(recipe)
    write_card(sa_zoo.open(run))
    sa_zoo.publish(run, REPO)
    sent = b"".join(published(server).values())
    assert b"jane" not in sent and b"clients" not in sent
    assert (run / "train.toml").read_text() == recipe, "the run can be resumed"
    command = "train.toml --set data.name=path/to/images --set model.init=path/to/model"
    assert command in published(server)["README.md"].decode()


def test_a_titled_data_set_of_the_hub_keeps_its_name():
    recipe = '[data]\nname = "them/pictures"\nrevision = "v1"\ntitle = "Pictures"\n'
    assert without_paths(recipe, "Pictures") == recipe


def test_the_explorer_becomes_a_space_that_the_card_links(server, run):
    for _ in range(2):
        sa_zoo.publish(run, REPO, tag="v2", space=SPACE)
    assert server.count("POST .*/commit/") == 2, "the second time there was nothing to do"
    files = published(server, f"spaces/{SPACE}")
    assert files.keys() == SPACE_FILES, "without the Hub's example"
    assert files["index.html"] == b"<p>a page"
    metadata = ModelCard(files["README.md"].decode()).data.to_dict()
    assert (metadata["sdk"], metadata["models"]) == ("static", [REPO])
    assert f"({server.url}/spaces/{SPACE})" in published(server)["README.md"].decode()
    assert f"({server.url}/{REPO})" in files["README.md"].decode()
    (run / "explorer.html").unlink()
    with pytest.raises(ValueError, match=r"without explorer\.html"):
        sa_zoo.publish(run, REPO, space=SPACE)


@pytest.mark.parametrize("theirs", ["spaces/them/attention", "them/test-vit"])
@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_published_if_one_place_is_not_ours(server, run, theirs, there):
    if there:
        server.repositories[theirs] = Repository(private=False)
        server.repositories[theirs].commit({"README.md": b"theirs"})
    space, repo_id = (theirs[7:], REPO) if "spaces" in theirs else (SPACE, theirs)
    with pytest.raises(PermissionError):
        sa_zoo.publish(run, repo_id, tag="v1", space=space, merge=True)
    assert server.count("POST .*/commit/") == server.count(TAG) == 0


def test_private_means_private_of_the_model_and_its_space(server, run):
    sa_zoo.publish(run, REPO, private=True, space=SPACE)
    repositories = server.repositories
    assert repositories.keys() == {REPO, f"spaces/{SPACE}"}
    assert all(repository.private for repository in repositories.values())
    for public in repositories:  # is no place for something private
        repositories[public].private = False
        (run / "LICENSE").write_text(public)
        with pytest.raises(PermissionError, match="already public"):
            sa_zoo.publish(run, REPO, private=True, space=SPACE)
        assert server.count(COMMIT) == 1
        repositories[public].private = True


def test_publishing_leaves_the_folder_as_it_is(server, run, capsys):
    write_card(sa_zoo.open(run))
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    assert sa_zoo.publish(run, REPO, private=True, tag="v1", dry_run=True) is None
    printed = capsys.readouterr().out
    assert server.log == []
    assert all(part in printed for part in ("model.safetensors", REPO, "private", "v1"))
    assert "not published: checkpoints, training_args.bin" in printed
    for repo_id in ("you/first", "you/second"):
        sa_zoo.publish(run, repo_id)
        assert published(server, repo_id)["README.md"].decode().count(repo_id) == 3
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


@pytest.mark.parametrize("kind", ["drop", "lose"])
def test_every_step_survives_a_broken_connection(server, run, kind):
    server.faults = [Fault(step, kind) for step in (CREATE, INFO, REFS, COMMIT, TAG)]
    server.faults.append(Fault("PUT /lfs/", "drop"))
    server.faults.append(Fault("GET .*/resolve/.*/model.safetensors", "cut"))
    commit = sa_zoo.publish(run, REPO, tag="v1")
    repository = server.repositories[REPO]
    assert repository.tags == {"v1": commit} and len(repository.commits) == 2
    assert not any(fault.times for fault in server.faults)


@pytest.mark.parametrize(
    ("asked", "waited"), [("0", 0.5), ("7", 7.0), ("next week", 0.5), ("3600", None)]
)
def test_a_busy_hub_is_asked_again_when_it_says(server, monkeypatch, asked, waited):
    pauses = []
    monkeypatch.setattr(remote, "WAITS", (0.5,))
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    server.faults = [Fault(REFS, 429, headers={"Retry-After": asked})]
    Remote(REPO).create(False)
    if waited is None:
        with pytest.raises(ConnectionError, match="too many requests"):
            Remote(REPO).tags()
    else:
        assert Remote(REPO).tags() == {}
    assert pauses == ([waited] if waited else [])


@pytest.mark.parametrize(
    "step",
    [
        "GET /api/spaces/.*/tree",  # a Space with the Hub's example
        "POST /api/spaces/.*/commit",
        "GET /spaces/",
        "PUT /lfs/",
        COMMIT,
        f"GET /{REPO}/resolve/",
        TAG,
    ],
)
def test_a_run_after_an_interruption_finishes_the_job(server, run, step):
    server.faults = [Fault(CREATE, "lose"), Fault(step, 400)]
    with pytest.raises(OSError):
        sa_zoo.publish(run, REPO, tag="v1", space=SPACE)
    repository = server.repositories[REPO]
    assert repository.tags == {}
    commit = sa_zoo.publish(run, REPO, tag="v1", space=SPACE)
    assert repository.tags == {"v1": commit} and len(repository.commits) == 2
    assert published(server, f"spaces/{SPACE}").keys() == SPACE_FILES, "without the Hub's example"


@pytest.mark.parametrize("name", ["model.safetensors", "index.html"])
def test_a_flipped_bit_on_download_gets_no_tag(server, run, name):
    server.faults = [Fault(f"GET .*/resolve/.*/{name}", "flip")]
    with pytest.raises(Refused, match=f"returned {name} with other bytes"):
        sa_zoo.publish(run, REPO, tag="v1", space=SPACE)
    assert server.repositories[REPO].tags == {}


@pytest.mark.parametrize("before", [COMMIT, f"GET /api/models/{REPO}/tree/"])
def test_a_commit_of_somebody_else_is_not_overwritten(server, run, before):
    theirs = {"theirs.txt": b"mine too", ".gitattributes": b""}
    sa_zoo.publish(run, REPO)
    (run / "LICENSE").write_text("Apache License")
    server.before[before] = lambda: server.repositories[REPO].commit(theirs)
    with pytest.raises(Refused, match="somebody else"):
        sa_zoo.publish(run, REPO, tag="v1")
    assert published(server) == {"theirs.txt": b"mine too"}
    assert server.repositories[REPO].tags == {}


@pytest.mark.parametrize(
    "theirs",
    [
        {"README.md": b"# Years of work\n", "weights/model.ckpt": b"w"},
        {"sa_zoo.json": b'{"files": [1]}'},
    ],
)
def test_other_work_is_listed_and_left_alone(server, run, theirs):
    repository = other_work(server, theirs)
    with pytest.raises(Refused, match=f"holds {', '.join(theirs)}, expected .*--merge"):
        sa_zoo.publish(run, REPO, tag="v1", space=SPACE)
    assert published(server) == theirs and len(repository.commits) == 1 and repository.tags == {}
    assert server.writes() == [CREATE] and server.objects == {}, "the Space, which is still empty"


def test_merging_replaces_equal_names_and_keeps_the_rest(server, run):
    other_work(server, {"README.md": b"# Mine\n", "weights/model.ckpt": b"w"})
    sa_zoo.publish(run, REPO, merge=True)
    assert b"# Mine" not in published(server)["README.md"]
    (run / "explorer.html").unlink()
    sa_zoo.publish(run, REPO)  # from now on it is known what is whose
    files = published(server)
    assert files["weights/model.ckpt"] == b"w" and "explorer.html" not in files


def test_files_edited_on_the_hub_stay_unless_merged(server, run):
    (run / "LICENSE").write_text("Apache License")
    sa_zoo.publish(run, REPO)
    repository = server.repositories[REPO]
    theirs = {"LICENSE": b"MIT", "notes.txt": b"n"}
    repository.commit(repository.commits[repository.head] | theirs)
    with pytest.raises(Refused, match=r"which holds LICENSE, expected"):
        sa_zoo.publish(run, REPO)
    (run / "LICENSE").unlink()
    (run / "report.md").write_text("a report")
    sa_zoo.publish(run, REPO)
    assert theirs.items() <= published(server).items() and "report.md" in published(server)
    (run / "LICENSE").write_text("Apache License")
    sa_zoo.publish(run, REPO, merge=True)
    assert theirs | {"LICENSE": b"Apache License"} == {
        name: published(server)[name] for name in theirs
    }


def test_a_tag_never_moves(server, run):
    first = sa_zoo.publish(run, REPO, tag="v1")
    (run / "train.toml").write_text('[model]\nname = "test_vit"\n[train]\nseed = 7\n')
    with pytest.raises(ValueError, match=r"got tag v1, .*train\.toml"):
        sa_zoo.publish(run, REPO, tag="v1")
    tags = server.repositories[REPO].tags
    server.before[TAG] = lambda: tags.update(v2="0" * 40)
    with pytest.raises(Refused, match="collides"):
        sa_zoo.publish(run, REPO, tag="v2")
    assert tags == {"v1": first, "v2": "0" * 40}


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, PermissionError, "HF_TOKEN"),
        (403, PermissionError, "choose a --repo-id of your own"),
        (404, FileNotFoundError, "check --repo-id you/test-vit and HF_ENDPOINT"),
        (418, Refused, "the Hub refuses .*418.*as the test wished for Bearer <token>"),
        (503, ConnectionError, "run this again later"),
    ],
)
def test_each_refusal_says_what_to_do(server, status, error, words):
    server.faults = [Fault(REFS, status, times=99)]
    with pytest.raises(error, match=f"could not read the tags at .*{words}") as raised:
        Remote(REPO).tags()
    assert TOKEN not in str(raised.value)
    assert server.count(REFS) == (3 if status == 503 else 1)


@pytest.mark.parametrize("token", ["", "hf_ümlaut"])
def test_without_a_usable_token_nothing_is_asked(server, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PermissionError, match="no usable token: set HF_TOKEN"):
        Remote(REPO).create(False)
    assert server.log == []


@pytest.mark.parametrize(
    ("repo_id", "tag"), [("test-vit", "v1"), ("you/..", "v1"), ("you/a/b", "v1"), (REPO, "v 1")]
)
def test_names_that_no_hub_takes_are_refused(server, run, repo_id, tag):
    with pytest.raises(ValueError):
        sa_zoo.publish(run, repo_id, tag=tag)
    assert server.log == []


def test_the_cards_code_runs_against_what_was_published(server, tmp_path):
    run = sa_zoo.open(make_run(tmp_path / "run", "sa_quadratic_tiny_cifar"))
    sa_zoo.publish(run.with_files(transformers_files(run)), REPO)
    with_timm, with_transformers, without_package = re.findall(
        r"```python\n(.*?)```", published(server)["README.md"].decode(), re.DOTALL
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
    server.log.clear()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(code)], env=environment, check=True)
    assert server.count(f"GET /{REPO}/resolve/.*/model.safetensors") == 1
