"""A repository on the Hub of HF_ENDPOINT, and the files to publish in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile

TITLE = "Publish with sa_zoo"  # of our commits
OURS = {TITLE, "initial commit"}  # the Hub creates a repository with an initial commit
HUBS_OWN = ".gitattributes"


@dataclass(frozen=True)
class Remote:
    """A model repository or a static Space."""

    api: HfApi
    repo_id: str
    files: dict[str, bytes]  # to publish
    kind: str = "model"  # or "space"

    @property
    def url(self) -> str:
        folder = "spaces/" if self.kind == "space" else ""
        return f"{self.api.endpoint}/{folder}{self.repo_id}"

    def look(self, private: bool) -> tuple[str, set[str]]:
        """The commit of main and its files; the repository is created if it does not exist.

        Raises FileExistsError for files that others committed, PermissionError if `private` and it is public.
        """
        place: dict[str, Any] = {"repo_id": self.repo_id, "repo_type": self.kind}
        sdk = "static" if self.kind == "space" else None
        self.api.create_repo(**place, private=private, space_sdk=sdk, exist_ok=True)
        self.api.auth_check(**place, write=True)
        info: Any = self.api.repo_info(**place)
        if private and not info.private:
            raise PermissionError(f"got {self.url}, which is public, expected a private one")
        tree: Any = self.api.list_repo_tree(**place, recursive=True, expand=True, revision=info.sha)
        titles = {
            file.path: getattr(file.last_commit, "title", "")
            for file in tree
            if isinstance(file, RepoFile)
        }
        others = sorted(path for path, title in titles.items() if title not in OURS)
        if others:
            raise FileExistsError(
                f"got {self.url}, which holds {', '.join(others)}, expected only files that "
                "sa_zoo published: nothing was changed; delete them there, or choose a new --repo-id"
            )
        return info.sha, set(titles)

    def commit(self, head: str, paths: set[str]) -> str:
        """Replace the files `paths` of `head` by ours, in one commit on top of it; if none differs, return `head`."""
        added = [CommitOperationAdd(path, content) for path, content in self.files.items()]
        deleted = [
            CommitOperationDelete(path) for path in sorted(paths - self.files.keys() - {HUBS_OWN})
        ]
        committed = self.api.create_commit(
            self.repo_id,
            [*added, *deleted],
            repo_type=self.kind,
            commit_message=TITLE,
            parent_commit=head,
        )
        return committed.oid

    def differing(self, commit: str, cache: str) -> str:
        """Names of the files of a commit, downloaded into `cache`, that are not ours, byte by byte."""
        snapshot = Path(
            self.api.snapshot_download(
                self.repo_id, repo_type=self.kind, revision=commit, cache_dir=cache
            )
        )
        paths = [path for path in snapshot.rglob("*") if path.is_file()]
        found = {path.relative_to(snapshot).as_posix(): path.read_bytes() for path in paths}
        found.pop(HUBS_OWN, None)
        return ", ".join(sorted(dict(found.items() ^ self.files.items())))
