"""Publish a model folder on a Hub. Running it again after any interruption finishes the job or does nothing."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

import torch
from huggingface_hub.utils import validate_repo_id

from sa_zoo.folders.check import checked
from sa_zoo.publishing.card import published_card
from sa_zoo.publishing.folder import (
    Manifest,
    check_complete,
    check_folder,
    check_loads,
    read_manifest,
    with_list,
)
from sa_zoo.publishing.remote import Refused, Remote


def publish(
    folder: Path,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    merge: bool = False,
) -> str | None:
    """Publish `folder` as `repo_id` ("you/name") and return the commit sha; with dry_run, check and print only.

    The Hub is that of HF_ENDPOINT, the token that of HF_TOKEN or the client's login. The tag comes last, on a commit
    that was downloaded, compared and loaded. A repository with other work is refused unless `merge` is on; files that
    are not from here stay, except that `merge` replaces those with the name of a published one. Raises ValueError for
    the folder or the arguments, PermissionError, FileNotFoundError, ConnectionError or Refused for the Hub, each with
    what to do.
    """
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(
            f"got repo_id {repo_id!r}, expected a namespace too, as in 'you/{repo_id}'"
        )
    if tag is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag):
        raise ValueError(f"got tag {tag!r}, expected letters, digits, '.', '_' and '-', as in 'v1'")
    check_complete(folder)
    with checked(f"local-dir:{folder}"):
        manifest = with_list(read_manifest(folder, published_card(folder, repo_id)))
        logits = check_folder(folder, manifest)
    remote = Remote(repo_id, os.environ.get("HF_ENDPOINT"))
    print(
        f"{folder} -> {remote.url}"
        + (" (private)" if private else "")
        + (f", tag {tag}" if tag else "")
    )
    for name, content in manifest.items():
        print(f"  {hashlib.sha256(content).hexdigest()[:12]} {len(content):>12,} {name}")
    if others := {path.name for path in folder.iterdir()} - {
        name.split("/")[0] for name in manifest
    }:
        print(f"  not published: {', '.join(sorted(others))}")
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None

    remote.create(private)
    if tag and (tagged := remote.tags().get(tag)):
        if differences := remote.differences(tagged, manifest, remote.others(tagged)[1]):
            there = f"{remote.url} has at {tagged} with other contents ({'; '.join(differences)})"
            raise ValueError(
                f"got tag {tag}, which {there}, expected a new one: published tags do not move"
            )
        print(f"{remote.url} already has this folder as {tag}, at {tagged}: nothing to do")
        return tagged
    commit = _commit(remote, manifest, merge)
    _check_download(remote, commit, manifest, logits)
    if tag:
        remote.tag(tag, commit)
        if (tagged := remote.tags().get(tag)) != commit:
            raise Refused(
                f"{remote.url} has tag {tag} at {tagged}, which collides with {commit}: choose a new tag"
            )
    print(f"published {remote.url} at {commit}" + (f", tagged {tag}" if tag else ""))
    return commit


def _commit(remote: Remote, manifest: Manifest, merge: bool) -> str:
    """Make main hold the manifest, if it does not yet, next to files that are not from here; return its commit.

    Raises Refused, before anything is sent, if such files are in the way and `merge` is off.
    """
    commit = remote.head()
    listed, others = remote.others(commit)
    same = sorted(others & manifest.keys())
    if not merge and (found := same if listed else sorted(others)):
        raise Refused(
            f"got {remote.url}, which holds {', '.join(found)}, expected an empty repository or one that sa_zoo "
            f"published: nothing was changed; choose a new --repo-id, or add --merge, which replaces "
            f"{', '.join(same) or 'none of its files'} and keeps all others"
        )
    if remote.differences(commit, manifest, others):
        commit = remote.commit(manifest, commit, others)
        if differences := remote.differences(commit, manifest, others):
            raise Refused(
                f"{remote.url} at {commit} is not what was sent ({'; '.join(differences)}): "
                "somebody else may be writing there: look at it, then run this again"
            )
    return commit


def _check_download(remote: Remote, commit: str, manifest: Manifest, logits: torch.Tensor) -> None:
    """Download a commit into a new cache, compare its bytes (the client checks lengths), load it by both libraries."""
    with tempfile.TemporaryDirectory() as cache:
        snapshot = remote.download(commit, cache)
        for name, content in manifest.items():
            if (snapshot / name).read_bytes() != content:
                raise Refused(
                    f"{remote.url} returned {name} with other bytes, nothing was tagged: run this again"
                )
        where = {"revision": commit, "cache_dir": cache, "local_files_only": True}
        loaded = check_loads(f"hf-hub:{remote.repo_id}@{commit}", remote.repo_id, **where)
    if not torch.allclose(loaded, logits, rtol=1e-5, atol=1e-5):
        raise Refused(
            f"{remote.url} at {commit} gives other logits than the folder, nothing was tagged"
        )
