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
    remote = Remote(repo_id, endpoint)
    repositories = [remote]
    space_url = ""
    if space:
        online = Space(space, endpoint)
        space_url = online.url
        repositories = [online, remote]  # first, as the card leads to it
    for repository in repositories:
        _check_names(repository.repo_id, tag)
    remote.files = _checked(opened, repo_id, space_url)
    if space:
        online.files = space_files(remote.files, repo_id, remote.url)
    named = f", tag {tag}" if tag else ""
    for repository in repositories:
        print(f"{opened.folder} -> {repository.url}{' (private)' * private}{named}")
        for name, content in repository.files.items():
            print(f"  {digests(content)['sha256'][:12]} {len(content):>12,} {name}")
    sent = {name.split("/")[0] for name in remote.files}
    left = {path.name for path in opened.local_folder.iterdir()} - sent
    if left:
        print(f"  not published: {', '.join(sorted(left))}")
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None
    if is_offline_mode():
        raise ConnectionError(f"could not publish {remote.url}: HF_HUB_OFFLINE is set, unset it")
    for repository in repositories:
        repository.create(private)
    commit = remote.tags().get(tag or "")
    if commit:
        _check_tagged(remote, commit, str(tag))
        print(f"{remote.url} already has this folder as {tag}, at {commit}")
        repositories.remove(remote)
        tag = None
    # all are looked at before the first is changed
    found = [_found(repository, merge) for repository in repositories]
    for repository, (parent, others) in zip(repositories, found, strict=True):
        published = _committed(repository, parent, others)
        _check_download(repository, published)
        print(f"published {repository.url} at {published}")
        if repository is remote:
            commit = published
    if commit and tag:
        _tag(remote, tag, commit)
    return commit


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


def _check_tagged(remote: Remote, commit: str, tag: str) -> None:
    """Raise ValueError if the commit that has the tag is not the files."""
    _, others = remote.others(commit)
    differences = remote.differences(commit, others)
    if differences:
        raise ValueError(
            f"got tag {tag}, which {remote.url} has at {commit} with other contents "
            f"({differences}), expected a new one: published tags do not move"
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


def _found(remote: Remote, merge: bool) -> tuple[str, set[str]]:
    """The commit of main, and its files that are not from here. Raises Refused if they are in the way of ours.

    With `merge`, they are not.
    """
    commit = remote.head()
    listed, others = remote.others(commit)
    same = sorted(others & remote.files.keys())
    in_the_way = same if listed else sorted(others)
    if in_the_way and not merge:
        raise Refused(
            f"got {remote.url}, which holds {', '.join(in_the_way)}, "
            "expected an empty repository or one that sa_zoo published: nothing was changed; "
            "choose a new --repo-id, or add --merge, which replaces "
            f"{', '.join(same) or 'none of its files'} and keeps all others"
        )
    return commit, others


def _committed(remote: Remote, commit: str, others: set[str]) -> str:
    """Make main, now at `commit`, hold the files and `others`, if it does not yet; return its commit."""
    if not remote.differences(commit, others):
        return commit
    commit = remote.commit(commit, others)
    differences = remote.differences(commit, others)
    if differences:
        raise Refused(
            f"{remote.url} at {commit} is not what was sent ({differences}): "
            "somebody else may be writing there: look at it, then run this again"
        )
    return commit


def _check_download(remote: Remote, commit: str) -> None:
    """Download a commit into a new cache, compare its bytes, as the client checks lengths only, and load a model."""
    with tempfile.TemporaryDirectory() as cache:
        snapshot = remote.download(commit, cache)
        for name, content in remote.files.items():
            if (snapshot / name).read_bytes() != content:
                raise Refused(
                    f"{remote.url} returned {name} with other bytes, nothing was tagged: "
                    "run this again"
                )
        if remote.kind == "model":
            source = f"hf-hub:{remote.repo_id}@{commit}"
            network = timm.create_model(source, pretrained=True, cache_dir=cache)
            where = {"revision": commit, "cache_dir": cache, "local_files_only": True}
            check_loads(network.eval(), remote.repo_id, **where)
