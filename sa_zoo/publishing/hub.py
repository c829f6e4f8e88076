"""Publish a model folder on a Hub. Running it again after any interruption finishes the job or does nothing."""

import os
import re
import tempfile

import timm
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import validate_repo_id

from sa_zoo.folders.check import checked
from sa_zoo.folders.opened import Opened
from sa_zoo.interchange.transformers_export import remote_code
from sa_zoo.publishing.card import published_card
from sa_zoo.publishing.folder import (
    Manifest,
    check_folder,
    check_loads,
    digests,
    read_manifest,
    with_list,
    without_paths,
)
from sa_zoo.publishing.remote import Refused, Remote, Space
from sa_zoo.publishing.space import space_files


def publish(
    opened: Opened,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    merge: bool = False,
    space: str = "",
) -> str | None:
    """Publish a folder as `repo_id` ("you/name") and return the commit sha; with dry_run, check and print only.

    With `space`, the explorer becomes a static Space of that name, to which the card leads.

    The Hub is that of HF_ENDPOINT, the token that of HF_TOKEN or the client's login. The tag comes last, on a commit
    that was downloaded, compared and loaded. A repository with other work is refused unless `merge` is on; files that
    are not from here stay, except that `merge` replaces those with the name of a published one. Raises ValueError for
    the folder or the arguments, PermissionError, FileNotFoundError, ConnectionError or Refused for the Hub, each with
    what to do.
    """
    endpoint = os.environ.get("HF_ENDPOINT")
    _check_names(repo_id, tag)
    remote = Remote(repo_id, endpoint)
    online = Space(space, endpoint)
    if space:
        _check_names(space, tag)
    manifest = _checked(opened, repo_id, online.url if space else "")
    repositories: list[tuple[Remote, Manifest]] = [(remote, manifest)]
    if space:
        # comes first: the card leads to it
        repositories.insert(0, (online, space_files(manifest, repo_id, remote.url)))
    named = f", tag {tag}" if tag else ""
    for repository, files in repositories:
        print(f"{opened.folder} -> {repository.url}{' (private)' * private}{named}")
        for name, content in files.items():
            print(f"  {digests(content)['sha256'][:12]} {len(content):>12,} {name}")
    sent = {name.split("/")[0] for name in manifest}
    others = {path.name for path in opened.local_folder.iterdir()} - sent
    if others:
        print(f"  not published: {', '.join(sorted(others))}")
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None
    if is_offline_mode():
        raise ConnectionError(f"could not publish {remote.url}: HF_HUB_OFFLINE is set, unset it")
    for repository, _ in repositories:
        repository.create(private)
    tagged = remote.tags().get(tag or "")
    if tagged:
        _check_same(remote, tagged, manifest, str(tag))
        print(f"{remote.url} already has this folder as {tag}, at {tagged}")
        repositories.remove((remote, manifest))
    # all are looked at before the first is changed
    found = [_found(repository, files, merge) for repository, files in repositories]
    commit = tagged or ""
    for (repository, files), (parent, others) in zip(repositories, found, strict=True):
        commit = _commit(repository, files, parent, others)
        with tempfile.TemporaryDirectory() as cache:
            _download(repository, commit, files, cache)
            if repository is remote:
                _check_loads(remote, commit, cache)
        print(f"published {repository.url} at {commit}")
    if tag and not tagged:
        _tag(remote, tag, commit)
    return tagged or commit


def _check_names(repo_id: str, tag: str | None) -> None:
    """Raise ValueError for names that no Hub takes."""
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(
            f"got repo_id {repo_id!r}, expected a namespace too, as in 'you/{repo_id}'"
        )
    if tag is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag):
        raise ValueError(f"got tag {tag!r}, expected letters, digits, '.', '_' and '-', as in 'v1'")


def _checked(opened: Opened, repo_id: str, space_url: str) -> Manifest:
    """All files to publish, after the checks that need no Hub.

    Code that config.json promises and the folder does not have is this package's.
    """
    with checked(opened.source):  # what transformers builds is bounded, too
        manifest = read_manifest(opened.local_folder)
        if "train.toml" in manifest:
            recipe = without_paths(manifest["train.toml"].decode(), opened.metrics.data).encode()
            if recipe != manifest["train.toml"]:
                print("train.toml is published without local paths; the one in the folder stays")
            manifest["train.toml"] = recipe
        if "auto_map" in opened.config:
            manifest = remote_code() | manifest
        manifest["README.md"] = published_card(opened, repo_id, space_url).encode()
        manifest = with_list(dict(sorted(manifest.items())))
        check_folder(opened, manifest)
    return manifest


def _check_same(remote: Remote, commit: str, manifest: Manifest, tag: str) -> None:
    """Raise ValueError if what has the tag is not the manifest."""
    differences = remote.differences(commit, manifest, remote.others(commit)[1])
    if differences:
        there = f"{remote.url} has at {commit} with other contents ({'; '.join(differences)})"
        raise ValueError(
            f"got tag {tag}, which {there}, expected a new one: published tags do not move"
        )


def _tag(remote: Remote, tag: str, commit: str) -> None:
    """Tag a commit. Raises Refused if somebody else has set the tag meanwhile."""
    remote.tag(tag, commit)
    tagged = remote.tags().get(tag)
    if tagged != commit:
        raise Refused(
            f"{remote.url} has tag {tag} at {tagged}, which collides with {commit}: "
            "choose a new tag"
        )


def _found(remote: Remote, manifest: Manifest, merge: bool) -> tuple[str, set[str]]:
    """The commit of main, and its files that are not from here. Raises Refused if they are in the way of the manifest.

    With `merge`, they are not.
    """
    commit = remote.head()
    listed, others = remote.others(commit)
    same = sorted(others & manifest.keys())
    in_the_way = same if listed else sorted(others)
    if in_the_way and not merge:
        raise Refused(
            f"got {remote.url}, which holds {', '.join(in_the_way)}, "
            "expected an empty repository or one that sa_zoo published: nothing was changed; "
            "choose a new --repo-id, or add --merge, which replaces "
            f"{', '.join(same) or 'none of its files'} and keeps all others"
        )
    return commit, others


def _commit(remote: Remote, manifest: Manifest, commit: str, others: set[str]) -> str:
    """Make main, now at `commit`, hold the manifest and `others`, if it does not yet; return its commit."""
    if not remote.differences(commit, manifest, others):
        return commit
    commit = remote.commit(manifest, commit, others)
    differences = remote.differences(commit, manifest, others)
    if differences:
        raise Refused(
            f"{remote.url} at {commit} is not what was sent ({'; '.join(differences)}): "
            "somebody else may be writing there: look at it, then run this again"
        )
    return commit


def _download(remote: Remote, commit: str, manifest: Manifest, cache: str) -> None:
    """Download a commit into a new cache, and compare its bytes: the client checks lengths only."""
    snapshot = remote.download(commit, cache)
    for name, content in manifest.items():
        if (snapshot / name).read_bytes() != content:
            raise Refused(
                f"{remote.url} returned {name} with other bytes, nothing was tagged: run this again"
            )


def _check_loads(remote: Remote, commit: str, cache: str) -> None:
    """Load a commit that is in the cache by both libraries."""
    source = f"hf-hub:{remote.repo_id}@{commit}"
    network = timm.create_model(source, pretrained=True, cache_dir=cache)
    where = {"revision": commit, "cache_dir": cache, "local_files_only": True}
    check_loads(network.eval(), remote.repo_id, **where)
