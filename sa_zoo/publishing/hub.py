"""Publish a model folder on a Hub. After any interruption, run it again to finish the job."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi

from sa_zoo.folders.check import checked
from sa_zoo.models.configuration_sa import AUTO_MAP
from sa_zoo.opened import Opened, open_model
from sa_zoo.publishing.card import published_card
from sa_zoo.publishing.folder import (
    HUB_ID,
    check_content,
    check_loads,
    read_manifest,
    without_paths,
)
from sa_zoo.publishing.remote import Remote
from sa_zoo.publishing.transformers_export import remote_code

# Names that git takes for a tag, apart from those of branches and commits.
TAG = re.compile(
    r"(?!(?:main|HEAD|[0-9a-f]{40}|.*\.lock)$)[A-Za-z0-9][\w-]*(?:\.[\w-]+)*", re.ASCII
)


def publish(
    model: str | Path | Opened,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    dry_run: bool = False,
) -> str | None:
    """Publish a model folder as `repo_id` ("you/name") and return the commit sha; with dry_run, check and print only.

        sa_zoo.publish("runs/mine", "you/mine", tag="v1", dry_run=True)

    HF_ENDPOINT names the Hub; HF_TOKEN or the client's login gives the token. The tag comes last, after the commit was
    downloaded, compared and loaded. Raises ValueError for the folder or the arguments, FileExistsError for a repository
    with files of others, and the errors of huggingface_hub.
    """
    opened = open_model(model)
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"got repository {repo_id!r}, expected one like 'you/name'")
    if tag is not None and not TAG.fullmatch(tag):
        raise ValueError(f"got tag {tag!r}, expected letters, digits, '.', '_' and '-', as in 'v1'")
    remote = Remote(HfApi(library_name="sa_zoo"), repo_id, manifest_of(opened, repo_id))
    print(f"{opened.folder} -> {remote.url}")
    for name, content in remote.files.items():
        print(f"  {len(content):>12,} {name}")
    if dry_run:
        print("the local checks pass; nothing was sent")
        return None
    return _send(remote, private, tag)


def _send(remote: Remote, private: bool, tag: str | None) -> str:
    """Commit the files, check the commit, and tag it."""
    head, paths = remote.look(private)
    refs = remote.api.list_repo_refs(remote.repo_id)
    tagged = {ref.name: ref.target_commit for ref in refs.tags}.get(tag or "")
    commit = tagged or remote.commit(head, paths)
    with TemporaryDirectory() as cache:
        snapshot = remote.check(commit, cache)
        check_loads(open_model(snapshot).network, snapshot)
    print(f"published {remote.url} at {commit}")
    if tag and not tagged:
        remote.api.create_tag(remote.repo_id, tag=tag, revision=commit)
    return commit


def manifest_of(opened: Opened, repo_id: str) -> dict[str, bytes]:
    """All files to publish, after the offline checks. Code is that of this package, never the folder's."""
    with checked(opened.source):  # bounds the networks of transformers, too
        manifest = read_manifest(opened.local_folder)
        if "metrics.json" not in manifest:
            raise ValueError(
                f"got {opened.folder} without metrics.json, expected the folder of a finished run; "
                f"`sa-zoo finish {opened.folder} --out NEW` makes one of a folder of another trainer"
            )
        if "train.toml" in manifest:
            recipe = manifest["train.toml"].decode()
            manifest["train.toml"] = without_paths(recipe, opened.metrics.data).encode()
        if "auto_map" in opened.config:
            if opened.config["auto_map"] != AUTO_MAP:
                raise ValueError(
                    f"config.json: got auto_map {opened.config['auto_map']}, expected {AUTO_MAP}: "
                    "the code of others is not published"
                )
            manifest |= remote_code()
        manifest["README.md"] = published_card(opened, repo_id).encode()
        for name, content in manifest.items():
            check_content(name, content)
        check_loads(opened.network, opened.local_folder)
    return dict(sorted(manifest.items()))
