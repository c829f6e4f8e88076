"""Publish a model folder to a Hub: one commit, downloaded again and checked before it gets a tag.

Every step looks at what is already there before it acts, so running the same command again after any interruption
finishes the job or does nothing. The folder itself is only read.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

import torch
from huggingface_hub.utils import validate_repo_id

from sa_zoo.publishing.card import published_card
from sa_zoo.publishing.folder import Manifest, check_complete, check_folder, check_loads, not_published, read_manifest
from sa_zoo.publishing.remote import Refused, Remote


def publish(
    folder: str | Path, repo_id: str, private: bool = False, tag: str | None = None, dry_run: bool = False
) -> str | None:
    """Publish `folder` as `repo_id` ("you/name") and return the commit sha; with dry_run, check and print only.

    The card is rendered for `repo_id`. The Hub is the one of HF_ENDPOINT, if that is set; the token comes from HF_TOKEN
    or the client's login. The tag comes last, on a commit whose files were downloaded again and compared, and which was
    loaded by timm and by transformers.

    Raises ValueError for the folder or the arguments, PermissionError, FileNotFoundError, ConnectionError or Refused
    for the Hub, each with what to do.
    """
    _check_names(repo_id, tag)
    folder = Path(folder)
    check_complete(folder)
    manifest = read_manifest(folder, published_card(folder, repo_id))
    logits = check_folder(folder, manifest)
    remote = Remote(repo_id, os.environ.get("HF_ENDPOINT"))
    _print_plan(folder, manifest, remote.url, private, tag)
    if dry_run:
        print("dry run: nothing was sent")
        return None

    remote.create(private)
    if tag and (tagged := remote.tags().get(tag)):
        return _already_tagged(remote, tagged, manifest, tag)
    commit = remote.head()
    if remote.differences(commit, manifest):
        commit = remote.commit(manifest, parent=commit)
    if differences := remote.differences(commit, manifest):
        raise Refused(
            f"{remote.url} at {commit} is not what was sent ({'; '.join(differences)}): "
            "somebody else may be writing there: look at it, then run this again"
        )
    assert commit, "no commit has no files, and so differs"
    _check_from_outside(remote, commit, manifest, logits)
    if tag:
        remote.tag(tag, commit)
    print(f"published {remote.url} at {commit}" + (f", tagged {tag}" if tag else ""))
    return commit


def _check_names(repo_id: str, tag: str | None) -> None:
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"got repo_id {repo_id!r}, expected a namespace too, as in 'you/{repo_id}'")
    if tag is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag):
        raise ValueError(f"got tag {tag!r}, expected letters, digits, '.', '_' and '-', as in 'v1'")


def _print_plan(folder: Path, manifest: Manifest, url: str, private: bool, tag: str | None) -> None:
    print(f"{folder} -> {url}" + (" (private)" if private else "") + (f", tag {tag}" if tag else ""))
    for name, file in manifest.items():
        print(f"  {file.sha256[:12]} {file.size:>12,} {name}")
    if others := not_published(folder, manifest):
        print(f"  not sent: {', '.join(others)}")


def _already_tagged(remote: Remote, tagged: str, manifest: Manifest, tag: str) -> str:
    if differences := remote.differences(tagged, manifest):
        raise ValueError(
            f"got tag {tag}, which {remote.url} has at {tagged} with other contents ({'; '.join(differences)}), "
            "expected a new one: published tags do not move"
        )
    print(f"{remote.url} holds this folder as {tag} already, at {tagged}: nothing to do")
    return tagged


def _check_from_outside(remote: Remote, commit: str, manifest: Manifest, logits: torch.Tensor) -> None:
    """Download the commit into an empty cache, compare every sha256, and load it by its sha with both libraries."""
    with tempfile.TemporaryDirectory() as cache:
        snapshot = remote.download(commit, cache)
        for name, file in manifest.items():
            # The client checks the length of a download, not its contents.
            if hashlib.sha256((snapshot / name).read_bytes()).hexdigest() != file.sha256:
                raise Refused(
                    f"{name} came back from {remote.url} with other bytes, nothing was tagged: run this again"
                )
        where = {"revision": commit, "cache_dir": cache, "local_files_only": True}
        loaded = check_loads(f"hf-hub:{remote.repo_id}@{commit}", remote.repo_id, where)
    if not torch.allclose(loaded, logits, rtol=1e-5, atol=1e-5):
        raise Refused(f"{remote.url} at {commit} loads with other logits than the folder, nothing was tagged")
