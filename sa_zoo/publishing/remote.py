"""One repository on a Hub, through the official client: bounded retries, and messages that say what to do.

The client retries uploads and downloads itself; it does not retry creating a repository, committing, tagging or
asking for information, so this file does.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from sa_zoo.publishing.folder import Manifest

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
LONGEST_WAIT = 60.0  # seconds; if a Hub asks for more, the command fails
TRANSIENT = (408, 429, 500, 502, 503, 504)
HUB_OWN_FILES = (".gitattributes",)  # written by the Hub when it creates a repository


class Refused(OSError):
    """The Hub does not do what was asked, or holds something else than what was sent."""


# HTTP status -> what to raise, what to do. Steps already done are recognized, so running the command again is safe.
LOG_IN = "set HF_TOKEN to a token that may write, or run `hf auth login`"
ADVICE: dict[int, tuple[type[Exception], str]] = {
    401: (PermissionError, f"the token is missing or not accepted: {LOG_IN}"),
    403: (PermissionError, "this token may not write there: give it that right, or choose a --repo-id of your own"),
    404: (FileNotFoundError, "nothing there that this token can see: check --repo-id {repo_id} and HF_ENDPOINT"),
    409: (Refused, "it collides with another change of {repo_id}: look at it, then run this again"),
    412: (Refused, "somebody else changed {repo_id} meanwhile: look at it, then run this again to publish on top"),
    429: (ConnectionError, "too many requests: wait a few minutes, then run this again"),
}
ADVICE_5XX = (ConnectionError, "the Hub has a problem of its own: run this again later")
ADVICE_OTHER = (Refused, "the Hub refuses")

Answer = TypeVar("Answer")


class Remote:
    """A model repository on the Hub at `endpoint` (None: the client's default)."""

    def __init__(self, repo_id: str, endpoint: str | None) -> None:
        self.api = HfApi(endpoint=endpoint, library_name="sa_zoo")
        self.repo_id = repo_id
        self.url = f"{self.api.endpoint}/{repo_id}"

    def create(self, private: bool) -> None:
        """Create the repository if it does not exist. Raises PermissionError if it has to be private and is public."""
        token = get_token()
        if not token or not token.isascii():
            raise PermissionError(f"no usable token: {LOG_IN}")
        self._attempt("create the repository", self.api.create_repo, self.repo_id, private=private, exist_ok=True)
        if private and not self._attempt("read the repository", self.api.model_info, self.repo_id).private:
            raise PermissionError(
                f"{self.url} is public already, expected private: change that there, or choose a new name"
            )

    def head(self) -> str | None:
        """Commit sha of the main branch."""
        return self._attempt("read the repository", self.api.model_info, self.repo_id).sha

    def tags(self) -> dict[str, str]:
        """Tag -> commit sha."""
        return self._attempt("read the tags", self._tags)

    def differences(self, commit: str | None, manifest: Manifest) -> list[str]:
        """Differences between the tree of `commit` and the manifest, one line per file; none if every byte is the same.

        In the tree, large files have their sha256 and small ones the sha1 of git's blob.
        """
        tree = self._tree(commit)
        lines = [f"{name}: missing" for name in manifest if name not in tree]
        lines += [f"{name}: not in the folder" for name in tree if name not in manifest]
        for name in manifest.keys() & tree.keys():
            there, here = tree[name], manifest[name]
            same = there.lfs.sha256 == here.sha256 if there.lfs else there.blob_id == here.git_sha1
            lines += [] if same else [f"{name}: other bytes"]
        return sorted(lines)

    def commit(self, manifest: Manifest, parent: str | None) -> str | None:
        """Make the tree equal to the manifest in one commit on top of `parent`; return main's commit after it.

        If an answer is lost, the commit exists and the head has moved: so the head is read before each attempt. The
        caller compares the trees in any case, and sees whether the commit there is this one.
        """
        stale = sorted(self._tree(parent).keys() - manifest.keys())
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, file.source) for name, file in manifest.items()),
            *(CommitOperationDelete(name) for name in stale),
        ]

        def once() -> str | None:
            head = self.api.model_info(self.repo_id).sha
            if head != parent:
                return head
            return self.api.create_commit(
                self.repo_id, operations, commit_message="Publish with sa_zoo", parent_commit=parent
            ).oid

        return self._attempt("commit", once)

    def download(self, commit: str, cache: str) -> Path:
        """Download the whole tree of a commit into a cache folder."""
        doing, download = "download what was committed", self.api.snapshot_download
        return Path(self._attempt(doing, download, self.repo_id, revision=commit, cache_dir=cache))

    def tag(self, name: str, commit: str) -> None:
        """Tag a commit. If an answer is lost, the next attempt finds the tag."""

        def once() -> None:
            if self._tags().get(name) != commit:
                self.api.create_tag(self.repo_id, tag=name, revision=commit)

        self._attempt("tag", once)

    def _tags(self) -> dict[str, str]:
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(self.repo_id).tags}

    def _tree(self, commit: str | None) -> dict[str, RepoFile]:
        if commit is None:
            return {}

        def once() -> list[RepoFile]:
            listed = self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            return [file for file in listed if isinstance(file, RepoFile) and file.path not in HUB_OWN_FILES]

        return {file.path: file for file in self._attempt("read the files", once)}

    def _attempt(self, doing: str, call: Callable[..., Answer], *arguments: Any, **keywords: Any) -> Answer:
        """Call the client until it answers, a few times; `doing` completes the message "could not ...\"."""
        for wait in (*WAITS, None):
            try:
                return call(*arguments, **keywords)
            except (OSError, RuntimeError, httpx2.TransportError) as error:
                cause = _hub_error(error)
                if cause is None:
                    raise
                pause = _pause(cause, wait)
                if pause is None:
                    raise self._explained(doing, cause) from error
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _explained(self, doing: str, error: Exception) -> Exception:
        if isinstance(error, OfflineModeIsEnabled):
            return ConnectionError(f"could not {doing}: HF_HUB_OFFLINE is set, unset it to publish")
        if not isinstance(error, HfHubHTTPError):
            return ConnectionError(
                f"could not {doing}: no answer from {self.api.endpoint} ({_without_token(str(error))}); "
                "check the network, the proxy and HF_ENDPOINT, set HF_HUB_DISABLE_XET=1 for a Hub without Xet storage, "
                "then run this again"
            )
        status = error.response.status_code
        kind, advice = ADVICE.get(status, ADVICE_5XX if status >= 500 else ADVICE_OTHER)
        said = _without_token(error.server_message or error.response.reason_phrase)
        return kind(f"could not {doing} at {self.url}: {advice.format(repo_id=self.repo_id)} (HTTP {status}: {said})")


def _hub_error(error: BaseException | None) -> Exception | None:
    """The HTTP or network error that `error` is or stands for: the client wraps some of them."""
    while error is not None:
        # Xet storage raises ConnectionError, and so does offline mode.
        if isinstance(error, (HfHubHTTPError, httpx2.TransportError, ConnectionError)):
            return error
        error = error.__cause__
    return None


def _pause(error: Exception, wait: float | None) -> float | None:
    """Seconds to wait before trying again, or None if that would not help."""
    if wait is None or isinstance(error, OfflineModeIsEnabled):
        return None
    if not isinstance(error, HfHubHTTPError):
        return wait
    header = error.response.headers.get("Retry-After", "0")
    asked = float(header) if header.isdecimal() else 0.0  # it can also be a date, which is ignored
    return max(wait, asked) if error.response.status_code in TRANSIENT and asked <= LONGEST_WAIT else None


def _without_token(message: str) -> str:
    """The message without the token: a client quotes a header that it cannot send, a server may quote what it got."""
    token = get_token()
    return message.replace(token, "<token>") if token else message
