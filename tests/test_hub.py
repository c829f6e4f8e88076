"""Publishing against a real HTTP server with the real client: the whole road, and every way it can break."""

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from catalogue import app
from hub_routes import Repository
from hub_server import TOKEN, Fault, HubServer
from huggingface_hub import ModelCard, constants
from model_folders import make_run
from packaging.version import Version
from typer.testing import CliRunner

import sa_zoo  # noqa: F401  registers the names
from sa_zoo.folders.opened import open_folder
from sa_zoo.interchange.transformers_export import export_for_transformers
from sa_zoo.publishing import remote
from sa_zoo.publishing.card import published_card, write_card
from sa_zoo.publishing.folder import PUBLISHED
from sa_zoo.publishing.hub import publish
from sa_zoo.publishing.remote import Refused

# The client sends LFS files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")

HUB_VERSION = Version(huggingface_hub.__version__).release
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


def published(hub):
    """Path -> bytes on the main branch, without the Hub's own file."""
    repository = hub.repositories[REPO]
    files = dict(repository.commits[repository.head])
    del files[".gitattributes"]
    return files


def test_the_whole_road_is_one_commit_and_a_tag_on_it(hub, run):
    commit = publish(open_folder(run), REPO, tag="v1")
    repository = hub.repositories[REPO]
    assert repository.tags == {"v1": commit} and repository.head == commit
    assert hub.count("POST .*/commit/") == 1
    names = [
        "README.md",
        "config.json",
        "history.jsonl",
        "metrics.json",
        "model.safetensors",
        "train.toml",
    ]
    expected = {name: (run / name).read_bytes() for name in names if name != "README.md"}
    expected["README.md"] = published_card(open_folder(run), REPO).encode()
    listed = json.loads(published(hub)["sa_zoo.json"])["files"]
    assert {name: digests["sha256"] for name, digests in listed.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in expected.items()
    }
    assert published(hub) == expected | {"sa_zoo.json": published(hub)["sa_zoo.json"]}


SPACE = "you/attention"
SPACE_FILES = {"README.md", "index.html", PUBLISHED}


@pytest.fixture
def explored(run):
    """The run with an explorer."""
    (run / "explorer.html").write_text("<p>a page")
    return run


def files_of(hub, name):
    repository = hub.repositories[name]
    return repository.commits[repository.head]


def test_the_explorer_becomes_a_space_to_which_the_card_leads(hub, explored):
    publish(open_folder(explored), REPO, tag="v1", space=SPACE)
    files = files_of(hub, f"spaces/{SPACE}")
    assert files.keys() - {".gitattributes"} == SPACE_FILES, "without the Hub's example"
    assert files["index.html"] == b"<p>a page"
    metadata = ModelCard(files["README.md"].decode()).data.to_dict()
    assert (metadata["sdk"], metadata["models"]) == ("static", [REPO])
    assert f"({hub.url}/spaces/{SPACE})" in published(hub)["README.md"].decode()
    assert f"({hub.url}/{REPO})" in files["README.md"].decode()
    before = hub.writes()
    publish(open_folder(explored), REPO, tag="v1", space=SPACE)
    assert hub.writes() == before, "nothing to do"


def test_a_space_with_other_work_is_left_alone_unless_merged(hub, explored):
    repository = hub.repositories[f"spaces/{SPACE}"] = Repository(private=False)
    theirs = {"README.md": b"theirs", "app.py": b"theirs"}
    repository.commit(theirs)
    with pytest.raises(Refused, match=r"holds README\.md, app\.py"):
        publish(open_folder(explored), REPO, space=SPACE)
    assert files_of(hub, f"spaces/{SPACE}") == theirs
    publish(open_folder(explored), REPO, space=SPACE, merge=True)
    merged = files_of(hub, f"spaces/{SPACE}")
    assert merged.keys() == SPACE_FILES | {"app.py"} and merged["app.py"] == b"theirs"


def test_a_flipped_bit_of_a_space_is_noticed(hub, explored):
    hub.faults.append(Fault("GET /spaces/.*/index.html", "flip"))
    with pytest.raises(Refused, match=r"index\.html with other bytes"):
        publish(open_folder(explored), REPO, space=SPACE)


def test_a_model_without_an_explorer_has_no_space_and_nothing_is_sent(hub, run):
    (run / "explorer.html").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"without explorer\.html"):
        publish(open_folder(run), REPO, space=SPACE)
    assert not hub.log


def test_publishing_and_a_dry_run_leave_the_folder_as_it_is_and_any_name_can_follow(
    hub, run, tmp_path
):
    write_card(open_folder(run))
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in run.rglob("*")
        if path.is_file()
    }
    folders = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")] if path.is_dir()}
    publish(open_folder(run), "you/first", dry_run=True)
    publish(open_folder(run), "you/first")
    publish(open_folder(run), "you/second", tag="v1")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert {
        path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")] if path.is_dir()
    } == folders
    for repo_id in ("you/first", "you/second"):
        repository = hub.repositories[repo_id]
        assert repository.commits[repository.head]["README.md"].decode().count(repo_id) == 3


def test_running_it_again_does_nothing(hub, run):
    publish(open_folder(run), REPO, tag="v1")
    hub.log.clear()
    publish(open_folder(run), REPO, tag="v1")
    assert hub.writes() == []


def test_a_dry_run_checks_and_prints_and_asks_nothing_of_the_hub(hub, run, capsys):
    assert publish(open_folder(run), REPO, private=True, tag="v1", dry_run=True) is None
    printed = capsys.readouterr().out
    assert hub.log == []
    assert (
        "model.safetensors" in printed
        and REPO in printed
        and "private" in printed
        and "v1" in printed
    )
    assert "not published: checkpoints, training_args.bin" in printed


def test_of_many_models_none_is_sent_unless_all_can_be(hub, run):
    last = run.parent / "test_zzz"
    command = ["publish", "--owner", "you", "--model-cards", str(run.parent)]
    shutil.copytree(run, last)
    (last / "metrics.json").unlink()
    done = CliRunner().invoke(app, command)
    assert "without metrics.json" in str(done.exception)
    assert hub.log == []
    shutil.copyfile(run / "metrics.json", last / "metrics.json")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert set(hub.repositories) == {"you/test_vit", "you/test_zzz"}


def test_every_step_survives_a_dropped_connection(hub, run):
    hub.faults = [Fault(step, "drop") for step in (CREATE, INFO, REFS, COMMIT, TAG)]
    assert publish(open_folder(run), REPO, tag="v1") == hub.repositories[REPO].tags["v1"]
    assert not any(fault.times for fault in hub.faults)


def test_every_step_survives_a_lost_answer_and_nothing_happens_twice(hub, run):
    hub.faults = [Fault(step, "lose") for step in (CREATE, INFO, REFS, COMMIT, TAG)]
    commit = publish(open_folder(run), REPO, tag="v1")
    repository = hub.repositories[REPO]
    assert repository.tags == {"v1": commit} and len(repository.commits) == 2
    assert not any(fault.times for fault in hub.faults)


def test_every_step_waits_as_long_as_a_busy_hub_asks(hub, run):
    hub.faults = [
        Fault(step, 503, headers={"Retry-After": "0"}) for step in (CREATE, INFO, REFS, TAG)
    ]
    hub.faults.append(Fault(COMMIT, 429, headers={"Retry-After": "1"}))
    started = time.monotonic()
    publish(open_folder(run), REPO, tag="v1")
    assert time.monotonic() - started >= 1
    assert not any(fault.times for fault in hub.faults)


@pytest.mark.parametrize(
    ("asked", "waited"), [("0", 0.5), ("7", 7.0), ("60", 60.0), ("next week", 0.5)]
)
def test_what_a_hub_asks_for_is_waited_and_at_least_the_pause_of_ones_own(
    hub, run, monkeypatch, asked, waited
):
    pauses = []
    monkeypatch.setattr(remote, "WAITS", (0.5,))
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    hub.faults = [Fault(REFS, 429, headers={"Retry-After": asked})]
    remote.Remote(REPO, hub.url).create(False)
    assert remote.Remote(REPO, hub.url).tags() == {}
    assert pauses == [waited]


def test_a_hub_that_asks_for_an_hour_gets_an_error_at_once(hub, run):
    hub.faults = [Fault(CREATE, 429, headers={"Retry-After": "3600"})]
    with pytest.raises(ConnectionError, match="too many requests"):
        publish(open_folder(run), REPO)
    assert hub.count(CREATE) == 1


def test_uploads_and_downloads_survive_dropped_and_cut_connections(hub, run):
    hub.faults = [Fault("PUT /lfs/", "drop"), Fault("GET .*/resolve/.*/model.safetensors", "cut")]
    publish(open_folder(run), REPO, tag="v1")
    assert not any(fault.times for fault in hub.faults)


@pytest.mark.parametrize(
    "step",
    [
        "POST .*/preupload/",
        "POST .*/batch",
        "PUT /lfs/",
        "POST /api/models/.*/commit/",
        "GET .*/resolve/",
        "POST .*/tag/",
    ],
)
def test_an_interruption_at_any_step_leaves_no_tag_and_the_next_run_finishes(hub, run, step):
    hub.faults = [Fault(step, 400)]
    with pytest.raises(OSError):
        publish(open_folder(run), REPO, tag="v1")
    assert hub.repositories[REPO].tags == {}
    commit = publish(open_folder(run), REPO, tag="v1")
    assert (
        hub.repositories[REPO].tags == {"v1": commit} and len(hub.repositories[REPO].commits) == 2
    )


def test_a_flipped_bit_on_download_gets_no_tag(hub, run):
    hub.faults = [Fault("GET .*/resolve/.*/model.safetensors", "flip")]
    with pytest.raises(
        Refused, match=r"returned model\.safetensors with other bytes, nothing was tagged"
    ):
        publish(open_folder(run), REPO, tag="v1")
    assert hub.repositories[REPO].tags == {}
    assert publish(open_folder(run), REPO, tag="v1") == hub.repositories[REPO].tags["v1"]


def test_somebody_else_committing_in_between_is_a_conflict_and_not_an_overwrite(hub, run):
    theirs = {"theirs.txt": b"mine too", ".gitattributes": b""}
    hub.before[COMMIT] = lambda: hub.repositories[REPO].commit(theirs)
    with pytest.raises(Refused, match="somebody else changed you/test-vit meanwhile"):
        publish(open_folder(run), REPO, tag="v1")
    assert published(hub) == {"theirs.txt": b"mine too"} and hub.repositories[REPO].tags == {}


def test_somebody_else_committing_before_the_attempt_is_noticed_too(hub, run):
    publish(open_folder(run), REPO)
    hub.before[f"GET /api/models/{REPO}/tree/"] = lambda: hub.repositories[REPO].commit(
        {"theirs.txt": b"1"}
    )
    (run / "LICENSE").write_text("Apache License")
    hub.log.clear()
    with pytest.raises(Refused, match=r"theirs\.txt"):
        publish(open_folder(run), REPO, tag="v1")
    assert hub.count(COMMIT) == 0 and hub.repositories[REPO].tags == {}


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
def test_a_repository_with_other_work_is_listed_and_left_alone(hub, run, theirs):
    repository = other_work(hub, theirs)
    with pytest.raises(
        Refused, match="expected an empty repository or one that sa_zoo published"
    ) as raised:
        publish(open_folder(run), REPO, tag="v1")
    assert f"holds {', '.join(theirs)}, expected" in str(raised.value) and "--merge" in str(
        raised.value
    )
    assert published(hub) == theirs and len(repository.commits) == 1 and repository.tags == {}
    assert hub.writes() == [] and hub.objects == {}


def test_merging_into_other_work_replaces_files_of_the_same_name_and_keeps_the_rest(hub, run):
    repository = other_work(hub, {"README.md": b"# Mine\n", "weights/model.ckpt": b"w"})
    commit = publish(open_folder(run), REPO, tag="v1", merge=True)
    assert repository.tags == {"v1": commit}
    assert (
        published(hub)["weights/model.ckpt"] == b"w"
        and b"# Mine" not in published(hub)["README.md"]
    )
    (run / "LICENSE").write_text("Apache License")  # from now on it is known what is whose
    publish(open_folder(run), REPO)
    assert (
        published(hub)["weights/model.ckpt"] == b"w"
        and published(hub)["LICENSE"] == b"Apache License"
    )
    (run / "LICENSE").unlink()
    publish(open_folder(run), REPO)
    assert published(hub)["weights/model.ckpt"] == b"w" and "LICENSE" not in published(hub)


def test_a_file_edited_on_the_hub_is_not_overwritten(hub, run):
    publish(open_folder(run), REPO)
    repository = hub.repositories[REPO]
    repository.commit(
        repository.commits[repository.head] | {"README.md": b"# By hand\n", "notes.txt": b"n"}
    )
    (run / "LICENSE").write_text("Apache License")
    with pytest.raises(Refused, match=r"which holds README\.md, expected"):
        publish(open_folder(run), REPO)
    assert published(hub)["README.md"] == b"# By hand\n" and len(repository.commits) == 3
    publish(open_folder(run), REPO, merge=True)
    assert published(hub)["notes.txt"] == b"n" and REPO.encode() in published(hub)["README.md"]


def test_a_file_edited_on_the_hub_that_left_the_folder_stays(hub, run):
    (run / "LICENSE").write_text("Apache License")
    publish(open_folder(run), REPO)
    repository = hub.repositories[REPO]
    repository.commit(repository.commits[repository.head] | {"LICENSE": b"MIT"})
    (run / "LICENSE").unlink()
    publish(open_folder(run), REPO)
    assert published(hub)["LICENSE"] == b"MIT"


def test_somebody_else_taking_the_tag_is_a_conflict(hub, run):
    hub.before[TAG] = lambda: hub.repositories[REPO].tags.update(v1="0" * 40)
    with pytest.raises(Refused, match="collides"):
        publish(open_folder(run), REPO, tag="v1")
    assert hub.repositories[REPO].tags == {"v1": "0" * 40}


def test_a_tag_never_moves_to_other_contents(hub, run):
    first = publish(open_folder(run), REPO, tag="v1")
    (run / "train.toml").write_text('[model]\nname = "test_vit"\n[train]\nseed = 7\n')
    write_card(open_folder(run))
    with pytest.raises(ValueError, match=r"got tag v1, .*train\.toml: other bytes"):
        publish(open_folder(run), REPO, tag="v1")
    second = publish(open_folder(run), REPO, tag="v2")
    assert hub.repositories[REPO].tags == {"v1": first, "v2": second} and first != second


def test_files_that_left_the_folder_leave_the_repository(hub, run):
    (run / "LICENSE").write_text("Apache License")
    publish(open_folder(run), REPO)
    (run / "LICENSE").unlink()
    publish(open_folder(run), REPO)
    assert "LICENSE" not in published(hub)


def test_no_pickle_is_ever_sent(hub, run):
    torch.save({}, run / "pytorch_model.bin")
    publish(open_folder(run), REPO, tag="v1")
    for repository in hub.repositories.values():
        assert not any(
            name.endswith((".bin", ".pt", ".pkl")) for name in repository.commits[repository.head]
        )
    assert len(hub.objects) == 1


def test_private_means_private(hub, run):
    publish(open_folder(run), REPO, private=True)
    assert hub.repositories[REPO].private


def test_a_public_repository_is_no_place_for_something_private(hub, run):
    hub.repositories[REPO] = Repository(private=False)
    hub.repositories[REPO].commit({})
    with pytest.raises(PermissionError, match="already public"):
        publish(open_folder(run), REPO, private=True)
    assert hub.count(COMMIT) == 0


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (401, PermissionError, "HF_TOKEN"),
        (403, PermissionError, "choose a --repo-id of your own"),
        (404, FileNotFoundError, "check --repo-id you/test-vit and HF_ENDPOINT"),
        (409, Refused, "collides"),
        (412, Refused, "somebody else"),
        (418, Refused, "the Hub refuses .*418.*as the test wished for Bearer <token>"),
        (429, ConnectionError, "too many requests"),
        (500, ConnectionError, "run this again later"),
        (503, ConnectionError, "run this again later"),
    ],
)
def test_each_refusal_says_what_to_do(hub, run, status, error, words):
    hub.faults = [Fault(REFS, status, times=99)]
    with pytest.raises(
        error, match=rf"could not read the tags at {hub.url}/{REPO}: .*{words}"
    ) as raised:
        publish(open_folder(run), REPO, tag="v1")
    assert TOKEN not in str(raised.value)
    assert hub.count(REFS) == (3 if status in (429, 500, 503) else 1)


def test_a_wrong_token_is_refused_and_not_repeated(hub, run, monkeypatch):
    wrong = "hf_" + "w" * 34
    monkeypatch.setenv("HF_TOKEN", wrong)
    with pytest.raises(PermissionError, match=r"not accepted.*HTTP 401") as raised:
        publish(open_folder(run), REPO)
    assert wrong not in str(raised.value) and hub.count(CREATE) == 1


@pytest.mark.parametrize("token", ["", "hf_ümlaut"])
def test_without_a_usable_token_nothing_is_asked(hub, run, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(PermissionError, match="no usable token: set HF_TOKEN"):
        publish(open_folder(run), REPO)
    assert hub.log == []


def test_somebody_elses_namespace_is_refused(hub, run):
    with pytest.raises(PermissionError, match=r"may not write there.*HTTP 403"):
        publish(open_folder(run), "them/test-vit")


def test_without_network_the_message_names_the_endpoint(hub, run, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"no answer from http://127\.0\.0\.1:9"):
        publish(open_folder(run), REPO)


@pytest.mark.skipif(
    HUB_VERSION < (1, 33), reason="huggingface_hub 1.8 does without by itself, 1.33 does not"
)
def test_a_hub_without_xet_storage_is_reported_with_what_to_do(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(ConnectionError, match=r"could not commit at .*set HF_HUB_DISABLE_XET=1"):
        publish(open_folder(run), REPO)


def test_offline_mode_is_named(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
        publish(open_folder(run), REPO)


def test_the_token_reaches_no_file_no_log_and_no_output(hub, run, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    hub.faults = [Fault(COMMIT, "drop")]
    publish(open_folder(run), REPO, tag="v1")
    captured = capfd.readouterr()
    assert TOKEN not in captured.out + captured.err + caplog.text
    (run / "training_args.bin").unlink()
    assert not any(TOKEN.encode() in path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert not any(TOKEN.encode() in content for content in published(hub).values())


@pytest.mark.parametrize("repo_id", ["test-vit", "you/..", "you/a/b", "you/a b"])
def test_a_repository_name_that_no_hub_takes_is_refused(hub, run, repo_id):
    with pytest.raises(ValueError, match=re.escape(repo_id)):
        publish(open_folder(run), repo_id)


def test_a_tag_that_git_would_not_take_is_refused(hub, run):
    with pytest.raises(ValueError, match=r"got tag 'v 1', expected letters"):
        publish(open_folder(run), REPO, tag="v 1")


def test_the_cards_code_runs_against_what_was_published(hub, tmp_path):
    run = make_run(tmp_path / "run", "sa_quadratic_tiny_cifar")
    export_for_transformers(open_folder(run))
    publish(open_folder(run), REPO)
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
