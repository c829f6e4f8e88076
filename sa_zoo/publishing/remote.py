"""One repository on a Hub, by the official client, with messages that say what to do, and retries that it lacks."""

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import HfHubHTTPError

from sa_zoo.publishing.folder import PUBLISHED, Manifest, digests, published_files

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
LONGEST_WAIT = 60.0  # seconds; if a Hub asks for more, the command fails
# Of httpx, which huggingface_hub 1 uses, or of httpx2, as version 2 does. HfHubHTTPError is one of them.
HTTPError: Any = HfHubHTTPError.__bases__[0]


class Refused(OSError):
    """The Hub does not do what was asked, or holds something else than what was sent."""


# HTTP status -> what to raise, what to do. After a ConnectionError the step is tried again; others would come back.
# Steps already done are recognized, so running the command again is safe.
LOG_IN = "set HF_TOKEN to a token that may write, or run `hf auth login`"
CHANGED = "somebody else changed {repo_id} meanwhile: look at it, then run this again"
ADVICE: dict[int, tuple[type[Exception], str]] = {
    401: (PermissionError, f"the token is missing or not accepted: {LOG_IN}"),
    403: (
        PermissionError,
        "this token may not write there: give it that right, or choose a --repo-id of your own",
    ),
    404: (
        FileNotFoundError,
        "nothing there that this token can see: check --repo-id {repo_id} and HF_ENDPOINT",
    ),
    409: (Refused, CHANGED),
    412: (Refused, CHANGED),
    408: (ConnectionError, "it took too long: run this again"),
    429: (ConnectionError, "too many requests: wait a few minutes, then run this again"),
    400: (Refused, "the Hub refuses"),  # and every other status below 500
    500: (ConnectionError, "the Hub has a problem of its own: run this again later"),  # and above
}

NO_ANSWER: tuple[type[Exception], str] = (
    ConnectionError,
    "no answer: check the network, the proxy and HF_ENDPOINT, set HF_HUB_DISABLE_XET=1 for a Hub "
    "without Xet storage, then run this again",
)

Method = TypeVar("Method", bound=Callable[..., Any])


def retried(doing: str) -> Callable[[Method], Method]:
    """Decorator of Remote's methods: call them again, a few times; `doing` completes the message "could not ...\"."""

    def decorate(method: Any) -> Any:
        @wraps(method)
        def attempt(remote: Any, *arguments: Any) -> Any:
            for wait in (*WAITS, None):
                try:
                    return method(remote, *arguments)
                except Exception as error:
                    cause = _hub_error(error)
                    if cause is None:
                        raise
                    explained = _explained(remote, doing, cause)
                    asked = _asked(cause)
                    may_pass = isinstance(explained, ConnectionError) and asked <= LONGEST_WAIT
                    if wait is None or not may_pass:
                        raise explained from error
                    time.sleep(max(wait, asked))

        return attempt

    return decorate


class Remote:
    """A model repository on the Hub at `endpoint` (None: the client's default)."""

    kind = "model"
    folder = ""  # of such repositories on the Hub
    settings: ClassVar[dict[str, Any]] = {}  # of a new one
    example: ClassVar[set[str]] = set()  # files that the Hub fills a new one with

    def __init__(self, repo_id: str, endpoint: str | None) -> None:
        self.api = HfApi(endpoint=endpoint, library_name="sa_zoo")
        self.repo_id = repo_id
        self.place: dict[str, Any] = {"repo_id": repo_id, "repo_type": self.kind}
        self.url = f"{self.api.endpoint}/{self.folder}{repo_id}"
        self.files: Manifest = {}  # that it is to hold

    @retried("write to the repository")
    def create(self, private: bool) -> None:
        """Create the repository if it does not exist.

        Raises PermissionError if the token may not write there, or if it has to be private and is public.
        """
        token = get_token()
        if not token or not token.isascii():
            raise PermissionError(f"no usable token: {LOG_IN}")
        # exist_ok would hide why a Hub refuses one that exists
        if not self.api.repo_exists(**self.place):
            self.api.create_repo(**self.place, **self.settings, private=private)
        self.api.auth_check(**self.place, write=True)
        if private and not self.api.repo_info(**self.place).private:
            raise PermissionError(
                f"{self.url} is already public, expected private: change that or choose a new name"
            )

    @retried("read the repository")
    def head(self) -> str:
        """Commit sha of the main branch; a Hub creates repositories with a first commit."""
        return str(self.api.repo_info(**self.place).sha)

    @retried("read the tags")
    def tags(self) -> dict[str, str]:
        """Tag -> commit sha."""
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(**self.place).tags}

    @retried("read the files")
    def others(self, commit: str) -> tuple[bool, set[str]]:
        """Whether a commit has the list of what this package published, and all files that are not as listed there.

        A repository that the Hub has created, and nobody has changed, is an empty list.
        """
        tree = self._tree(commit)
        listed: dict[str, dict[str, str]] = {}
        if PUBLISHED in tree:
            with TemporaryDirectory() as cache:
                path = self.api.hf_hub_download(
                    **self.place, filename=PUBLISHED, revision=commit, cache_dir=cache
                )
                listed = published_files(Path(path).read_bytes())
        if not listed and tree and tree.keys() <= self.example:
            commits = self.api.list_repo_commits(**self.place, revision=commit)
            if [each.title for each in commits] == ["initial commit"]:  # the Hub's own
                return True, set()
        if not listed:
            return False, set(tree)
        mine = {name for name in listed if tree.get(name) in listed[name].values()}
        return True, tree.keys() - mine - {PUBLISHED}

    @retried("read the files")
    def differences(self, commit: str, others: set[str]) -> str:
        """What differs between the tree of `commit`, apart from `others`, and `files`; empty if nothing."""
        tree = self._tree(commit)
        found = dict.fromkeys(self.files.keys() - tree.keys(), "missing")
        found |= dict.fromkeys(tree.keys() - self.files.keys() - others, "not in the folder")
        for name in self.files.keys() & tree.keys():
            if tree[name] not in digests(self.files[name]).values():
                found[name] = "other bytes"
        return "; ".join(f"{name}: {found[name]}" for name in sorted(found))

    @retried("commit")
    def commit(self, parent: str, others: set[str]) -> str:
        """Make the tree equal to `files` and `others` in one commit on top of `parent`; return main's commit.

        If main has moved from `parent`, nothing is committed: either the answer to an earlier attempt was lost, or
        somebody else committed. `differences` tells which.
        """
        head = str(self.api.repo_info(**self.place).sha)
        if head != parent:
            return head
        left = sorted(self._tree(parent).keys() - self.files.keys() - others)
        added = [CommitOperationAdd(name, content) for name, content in self.files.items()]
        committed = self.api.create_commit(
            **self.place,
            operations=[*added, *map(CommitOperationDelete, left)],
            commit_message="Publish with sa_zoo",
            parent_commit=parent,
        )
        return committed.oid

    @retried("download what was committed")
    def download(self, commit: str, cache: str) -> Path:
        return Path(self.api.snapshot_download(**self.place, revision=commit, cache_dir=cache))

    @retried("tag")
    def tag(self, name: str, commit: str) -> None:
        """Tag a commit. A tag that exists stays where it is: it may be from an attempt whose answer was lost."""
        self.api.create_tag(**self.place, tag=name, revision=commit, exist_ok=True)

    def _tree(self, commit: str) -> dict[str, str]:
        """Path -> one of the `digests` of each file of a commit."""
        listed = self.api.list_repo_tree(**self.place, recursive=True, revision=commit)
        files = [file for file in listed if isinstance(file, RepoFile)]
        tree = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
        tree.pop(".gitattributes", None)  # the Hub itself writes it when it creates a repository
        return tree


class Space(Remote):
    """A static Space."""

    kind = "space"
    folder = "spaces/"
    settings: ClassVar[dict[str, Any]] = {"space_sdk": "static"}
    example: ClassVar[set[str]] = {"README.md", "index.html", "style.css"}


def _hub_error(error: BaseException | None) -> Exception | None:
    """The HTTP or network error that `error` is or was raised from: the client wraps some of them."""
    while error:
        if isinstance(error, (HTTPError, ConnectionError)):  # Xet storage raises ConnectionError
            return error
        error = error.__cause__
    return None


def _asked(error: Exception) -> float:
    """Seconds to wait that the Hub asks for."""
    if not isinstance(error, HfHubHTTPError):
        return 0.0
    header = error.response.headers.get("Retry-After", "")
    return float(header) if header.isdecimal() else 0.0  # it can also be a date, which is ignored


def _explained(remote: Remote, doing: str, error: Exception) -> Exception:
    """The exception to raise: what could not be done, why, and what to do."""
    kind, advice = NO_ANSWER
    reason = str(error)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        kind, advice = ADVICE.get(status, ADVICE[400 if status < 500 else 500])
        reason = f"HTTP {status}: {error.server_message or error.response.reason_phrase}"
    why = f"{advice.format(repo_id=remote.repo_id)} ({reason})"
    message = f"could not {doing} at {remote.url}: {why}"
    token = get_token()
    if token:  # a client quotes a header that it cannot send, a server may quote what it got
        message = message.replace(token, "<token>")
    return kind(message)
