"""Publishing to a real HTTP server with the real client, and every way it can break."""

import shutil

import pytest
from hub_server import TOKEN, HubServer
from huggingface_hub import constants
from model_folders import make_run

import sa_zoo
from sa_zoo.publishing.card import write_card

REPO = "you/test-vit"
CREATE = "POST /api/repos/create"
COMMIT = "POST /api/models/.*/commit/"
TAG = "POST /api/models/.*/tag/"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small timm model as a run leaves it, with things next to it that must not be published."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "test_vit", "test_vit", num_classes=7)
    recipe = '[model]\nname = "test_vit"\ninit = "/home/jane/net"\n[data]\nname = "clients/a"\n'
    (folder / "train.toml").write_text(recipe)
    (folder / "explorer.html").write_text("<p>a page")
    write_card(sa_zoo.open(folder))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "state.safetensors").write_bytes(b"large")
    (folder / "training_args.bin").write_bytes(b"\x80\x02a pickle with " + TOKEN.encode())
    (folder / "mine.py").write_text("print('not the code of the model')")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "test_vit")


@pytest.fixture
def server(monkeypatch, tmp_path):
    with HubServer() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        yield server


def published(repository):
    """Path -> bytes on the main branch, without the Hub's own file."""
    files = repository.commits[repository.head].items()
    return {path: content for path, content in files if path != ".gitattributes"}


def test_a_run_becomes_one_commit_with_a_tag(server, run, capsys):
    assert sa_zoo.publish(run, REPO, tag="v1", dry_run=True) is None
    assert server.log == [] and "model.safetensors" in capsys.readouterr().out
    for _ in range(2):  # the second time there is nothing to do
        commit = sa_zoo.publish(run, REPO, tag="v1")
    model = server.repositories[REPO]
    assert model.tags == {"v1": commit} and model.head == commit
    assert len(model.commits) == 2
    files = published(model)
    names = "README.md config.json explorer.html history.jsonl metrics.json model.safetensors"
    assert files.keys() == {*names.split(), "train.toml"}
    assert files["model.safetensors"] == (run / "model.safetensors").read_bytes()
    sent = b"".join(files.values())
    assert b"jane" not in sent and b"clients" not in sent and TOKEN.encode() not in sent
    assert b"--set data.name=path/to/images --set model.init=path/to/model" in sent


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (CREATE, "lose"),
        (COMMIT, "lose"),
        (COMMIT, 503),
        (TAG, "lose"),
    ],
)
def test_a_run_after_an_interruption_finishes_the_job(server, run, step, kind):
    server.faults = {step: kind}
    with pytest.raises(Exception) as interrupted:
        sa_zoo.publish(run, REPO, tag="v1")
    assert interrupted.type is not ValueError
    commit = sa_zoo.publish(run, REPO, tag="v1")
    repository = server.repositories[REPO]
    assert repository.tags == {"v1": commit} and len(repository.commits) == 2


@pytest.mark.parametrize(
    ("name", "title"), [("a.ckpt", "initial commit"), ("model.safetensors", "mine")]
)
def test_files_of_others_are_listed_and_stay(server, run, name, title):
    sa_zoo.publish(run, REPO)
    repository = server.repositories[REPO]
    edited = published(repository) | {name: b"work of years"}
    repository.commit(edited, title)
    (run / "LICENSE").write_text("Apache License")
    (run / "explorer.html").write_text("another page")
    with pytest.raises(FileExistsError, match=f"holds {name}, expected"):
        sa_zoo.publish(run, REPO, tag="v1")
    assert published(repository) == edited and repository.tags == {}
    assert server.count("POST .*/commit/") == 1


def test_a_card_that_was_edited_on_the_hub_is_replaced(server, run, capsys):
    sa_zoo.publish(run, REPO)
    repository = server.repositories[REPO]
    files = published(repository)
    repository.commit(files | {"README.md": b"without a typo"})
    sa_zoo.publish(run, REPO)
    assert published(repository) == files and len(repository.commits) == 4
    assert b"(explorer.html)" in files["README.md"]
    assert "README.md was edited there" in capsys.readouterr().out


def test_a_repository_of_somebody_else_changes_nothing(server, run):
    with pytest.raises(OSError, match="403"):
        sa_zoo.publish(run, "them/attention")
    assert server.count("POST .*/commit/") == 0


def test_a_commit_of_somebody_else_in_between_stays(server, run):
    server.faults = {COMMIT: lambda: server.repositories[REPO].commit({"a": b"theirs"})}
    with pytest.raises(OSError, match="412"):
        sa_zoo.publish(run, REPO, tag="v1")
    assert published(server.repositories[REPO]) == {"a": b"theirs"}


def test_other_bytes_on_download_get_no_tag(server, run):
    def flip():
        files = server.repositories[REPO].commits[server.repositories[REPO].head]
        files["model.safetensors"] = files["model.safetensors"][:-1] + b"?"

    server.faults = {f"GET /{REPO}/resolve/.*/model.safetensors": flip}
    with pytest.raises(ValueError, match=r"other contents .*: model\.safetensors"):
        sa_zoo.publish(run, REPO, tag="v1")
    assert server.repositories[REPO].tags == {}


def test_private_is_never_public(server, run):
    sa_zoo.publish(run, REPO, private=True)
    assert server.repositories[REPO].private
    server.repositories[REPO].private = False
    with pytest.raises(PermissionError, match="public"):
        sa_zoo.publish(run, REPO, private=True)


def test_a_tag_never_moves_and_is_compared_with_its_own_commit(server, run):
    first = sa_zoo.publish(run, REPO, tag="v1")
    (run / "LICENSE").write_text("Apache License")
    second = sa_zoo.publish(run, REPO, tag="v2")
    with pytest.raises(ValueError, match=r"other contents .*: LICENSE;"):
        sa_zoo.publish(run, REPO, tag="v1")
    (run / "LICENSE").unlink()
    assert sa_zoo.publish(run, REPO, tag="v1") == first, "main holds v2"
    repository = server.repositories[REPO]
    assert repository.tags == {"v1": first, "v2": second} and repository.head == second


@pytest.mark.parametrize(
    ("repo_id", "tag"),
    [("test-vit", "v1")] + [(REPO, tag) for tag in ("main", "v1..2", "a" * 40)],
)
def test_names_that_no_hub_takes_are_refused(run, repo_id, tag):
    with pytest.raises(ValueError, match="expected"):
        sa_zoo.publish(run, repo_id, tag=tag, dry_run=True)
