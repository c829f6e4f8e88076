"""A repository on the Hub of HF_ENDPOINT, and the files to publish in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile

TITLE = "Publish with sa_zoo"  # of our commits
MAIN = "model.safetensors"
HUBS_OWN = ".gitattributes"
# titles and files of the commit with which the Hub creates a repository
CREATED = {("initial commit", HUBS_OWN), ("initial commit", "README.md")}


@dataclass(frozen=True)
class Remote:
    """A model repository."""

    api: HfApi
    repo_id: str
    files: dict[str, bytes]  # to publish

    @property
    def url(self) -> str:
        return f"{self.api.endpoint}/{self.repo_id}"

    def look(self, private: bool) -> tuple[str, set[str]]:
        """The commit of main and its files; the repository is created if it does not exist.

        Files of ours may have been edited there, except for the weights. Raises FileExistsError for other files of
        others, PermissionError if `private` and the repository is public.
        """
        self.api.create_repo(self.repo_id, private=private, exist_ok=True)
        self.api.auth_check(self.repo_id, write=True)
        info: Any = self.api.repo_info(self.repo_id)
        if private and not info.private:
            raise PermissionError(f"got {self.url}, which is public, expected a private one")
        tree: Any = self.api.list_repo_tree(
            self.repo_id, recursive=True, expand=True, revision=info.sha
        )
        titles = {
            file.path: getattr(file.last_commit, "title", "")
            for file in tree
            if isinstance(file, RepoFile)
        }
        others = sorted(
            path
            for path, title in titles.items()
            if title != TITLE and (title, path) not in CREATED
        )
        edited = titles.get(MAIN) == TITLE and self.files.keys() >= set(others)
        if others and not edited:
            raise FileExistsError(
                f"got {self.url}, which holds {', '.join(others)}, expected only files that "
                "sa_zoo published: nothing was changed; delete them there, or choose a new --repo-id"
            )
        for path in others:
            print(f"{path} was edited there; the new commit replaces it")
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
            commit_message=TITLE,
            parent_commit=head,
        )
        return committed.oid

    def check(self, commit: str, cache: str) -> Path:
        """Download a commit into `cache`. Raises ValueError unless all files are ours, byte by byte."""
        snapshot = Path(self.api.snapshot_download(self.repo_id, revision=commit, cache_dir=cache))
        paths = [path for path in snapshot.rglob("*") if path.is_file()]
        found = {path.relative_to(snapshot).as_posix(): path.read_bytes() for path in paths}
        found.pop(HUBS_OWN, None)
        differing = sorted(dict(found.items() ^ self.files.items()))
        if differing:
            raise ValueError(
                f"got other contents in {self.url} at {commit}: {', '.join(differing)}; "
                "run this again, with a new tag if there is one, as tags do not move"
            )
        return snapshot
