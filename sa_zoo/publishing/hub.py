"""Publish a model folder on a Hub. After any interruption, run it again to finish the job."""

import re
import tempfile
from pathlib import Path

import timm
from huggingface_hub import is_offline_mode

from sa_zoo.folders.check import checked
from sa_zoo.folders.opened import Opened, open_model
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
from sa_zoo.publishing.transformers_export import remote_code


def publish(
    model: str | Path | Opened,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
    merge: bool = False,
    space: str = "",
) -> str | None:
    """Publish a model folder as `repo_id` ("you/name") and return the commit sha; with dry_run, check and print only.

        sa_zoo.publish("runs/mine", "you/mine", tag="v1", dry_run=True)

    With `space`, the explorer becomes a static Space of that name, and the card links to it.

    HF_ENDPOINT names the Hub; HF_TOKEN or the client's login gives the token. The tag comes last, after the commit was
    downloaded, compared and loaded. A repository with other files is refused without `merge`. Files of others stay;
    `merge` overwrites those with the name of a published file. Raises ValueError for the folder or the arguments, and
    PermissionError, FileNotFoundError, ConnectionError or Refused for the Hub, each with a remedy.
    """
    opened = open_model(model)
    remote = Remote(repo_id)
    online = Space(space) if space else None
    repositories = [online, remote] if online else [remote]  # the card links to the Space
    if tag is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag):
        raise ValueError(f"got tag {tag!r}, expected letters, digits, '.', '_' and '-', as in 'v1'")
    remote.files = manifest_of(opened, repo_id, online.url if online else "")
    if online:
        online.files = space_files(remote.files, repo_id, remote.url)
    _show(opened, repositories, f"{' (private)' * private}{f', tag {tag}' if tag else ''}")
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None
    if is_offline_mode():
        raise ConnectionError(f"could not publish {remote.url}: HF_HUB_OFFLINE is set, unset it")
    for repository in repositories:
        repository.create(private)
    commit = remote.tags().get(tag or "")
    if commit:
        differing = remote.look(commit).differing
        if differing:
            raise ValueError(
                f"got tag {tag}, which {remote.url} has at {commit} with other contents "
                f"({differing}), expected a new one: published tags do not move"
            )
        print(f"{remote.url} already has this folder as {tag}, at {commit}")
        repositories.remove(remote)
    # look at all before changing the first
    found = [repository.look(repository.head()) for repository in repositories]
    for repository, state in zip(repositories, found, strict=True):
        if not merge:
            repository.check_free(state)
    for repository, state in zip(repositories, found, strict=True):
        published = repository.update(state)
        _check_download(repository, published)
        print(f"published {repository.url} at {published}")
    if commit or not tag:
        return commit or published
    remote.tag(tag, published)
    tagged = remote.tags().get(tag)
    if tagged != published:
        raise Refused(
            f"{remote.url} has tag {tag} at {tagged}, which collides with {published}: "
            "choose a new tag"
        )
    return published


def _show(opened: Opened, repositories: list[Remote], how: str) -> None:
    """Print which files go where, and which are not published."""
    for repository in repositories:
        print(f"{opened.folder} -> {repository.url}{how}")
        for name, content in repository.files.items():
            print(f"  {digests(content)['sha256'][:12]} {len(content):>12,} {name}")
    sent = {name.split("/")[0] for name in repositories[-1].files}
    left = {path.name for path in opened.local_folder.iterdir()} - sent
    if left:
        print(f"  not published: {', '.join(sorted(left))}")


def manifest_of(opened: Opened, repo_id: str, space_url: str = "") -> Manifest:
    """All files to publish, after the offline checks.

    If config.json refers to code missing in the folder, the code of this package is added.
    """
    with checked(opened.source):  # bounds the networks of transformers, too
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


def _check_download(remote: Remote, commit: str) -> None:
    """Download a commit into a new cache, compare bytes (the client checks lengths only), and load a model."""
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
            check_loads(
                network.eval(),
                remote.repo_id,
                revision=commit,
                cache_dir=cache,
                local_files_only=True,
            )
