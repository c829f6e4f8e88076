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
    page: Manifest = {}
    space_url = ""
    if space:
        _check_names(space, tag)
        page = space_files(opened, repo_id, remote.url)
        space_url = online.url
    manifest = _checked(opened, repo_id, space_url)
    print(f"{opened.folder} -> {remote.url}{' (private)' * private}{_tagged(tag)}")
    _list(manifest)
    sent = {name.split("/")[0] for name in manifest}
    others = {path.name for path in opened.local_folder.iterdir()} - sent
    if others:
        print(f"  not published: {', '.join(sorted(others))}")
    if page:
        print(f"{opened.folder} -> {online.url}{' (private)' * private}")
        _list(page)
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None
    if is_offline_mode():
        raise ConnectionError(f"could not publish {remote.url}: HF_HUB_OFFLINE is set, unset it")
    commit = _publish_model(remote, manifest, private, tag, merge)
    if page:
        at = _commit(online, page, merge, new_space=online.create(private))
        with tempfile.TemporaryDirectory() as cache:
            _download(online, at, page, cache)
        print(f"published {online.url} at {at}")
    return commit


def _tagged(tag: str | None) -> str:
    return f", tag {tag}" if tag else ""


def _list(manifest: Manifest) -> None:
    """Print what is published."""
    for name, content in manifest.items():
        print(f"  {digests(content)['sha256'][:12]} {len(content):>12,} {name}")


def _publish_model(
    remote: Remote, manifest: Manifest, private: bool, tag: str | None, merge: bool
) -> str:
    """Commit, check and tag; returns the commit."""
    remote.create(private)
    tagged = remote.tags().get(tag or "")
    if tagged:
        _check_same(remote, tagged, manifest, str(tag))
        print(f"{remote.url} already has this folder as {tag}, at {tagged}: nothing to do")
        return tagged
    commit = _commit(remote, manifest, merge)
    _check_download(remote, commit, manifest)
    if tag:
        _tag(remote, tag, commit)
    print(f"published {remote.url} at {commit}{_tagged(tag)}")
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


def _commit(remote: Remote, manifest: Manifest, merge: bool, new_space: bool = False) -> str:
    """Make main hold the manifest, if it does not yet, next to files that are not from here; return its commit.

    Raises Refused, before anything is sent, if such files are in the way and `merge` is off. A `new_space` has none:
    the Hub fills it with an example, which is replaced.
    """
    commit = remote.head()
    listed, others = remote.others(commit)
    if new_space:
        listed, others = True, set()
    same = sorted(others & manifest.keys())
    in_the_way = same if listed else sorted(others)
    if in_the_way and not merge:
        raise Refused(
            f"got {remote.url}, which holds {', '.join(in_the_way)}, "
            "expected an empty repository or one that sa_zoo published: nothing was changed; "
            "choose a new --repo-id, or add --merge, which replaces "
            f"{', '.join(same) or 'none of its files'} and keeps all others"
        )
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


def _check_download(remote: Remote, commit: str, manifest: Manifest) -> None:
    """Download a commit, and load it by both libraries."""
    with tempfile.TemporaryDirectory() as cache:
        _download(remote, commit, manifest, cache)
        network = timm.create_model(
            f"hf-hub:{remote.repo_id}@{commit}", pretrained=True, cache_dir=cache
        )
        where = {"revision": commit, "cache_dir": cache, "local_files_only": True}
        check_loads(network.eval(), remote.repo_id, **where)
