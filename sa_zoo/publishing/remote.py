"""One repository on a Hub, by the official client, with retries and with a remedy in each error message."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from sa_zoo.publishing.folder import PUBLISHED, Manifest, digests, published_files

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt
LONGEST_WAIT = 60.0  # seconds; the command fails if a Hub asks for more
# From httpx (huggingface_hub 1) or httpx2 (huggingface_hub 2). HfHubHTTPError is a subclass.
HTTPError: Any = HfHubHTTPError.__bases__[0]


class Refused(OSError):
    """The Hub refused a request, or holds other contents than were sent."""


# HTTP status -> exception, remedy. Only a ConnectionError is retried; other errors would come back.
# Finished steps are recognized, so running the command again is safe.
LOG_IN = "set HF_TOKEN to a token that may write, or run `hf auth login`"
CHANGED = "somebody else changed {repo_id} meanwhile: look at it, then run this again"
ADVICE = {
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
    """Decorator of Remote's methods: retry them a few times; `doing` completes the message "could not ...\"."""

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
                    explained, asked = _explained(remote, doing, cause)
                    may_pass = isinstance(explained, ConnectionError) and asked <= LONGEST_WAIT
                    if wait is None or not may_pass:
                        raise explained from error
                    time.sleep(max(wait, asked))

        return attempt

    return decorate


@dataclass(frozen=True)
class State:
    """A commit compared with the files to publish."""

    commit: str
    others: set[str]  # files not from this package, or changed since
    in_the_way: list[str]  # files in `others` that publishing must not replace
    differing: str  # names of missing, added or changed files, without `others`


class Remote:
    """A model repository on the Hub of HF_ENDPOINT."""

    kind = "model"
    folder = ""  # of such repositories on the Hub
    settings: ClassVar[dict[str, Any]] = {}  # of a new one
    example: ClassVar[set[str]] = set()  # the Hub's files in a new one

    def __init__(self, repo_id: str) -> None:
        """Raises ValueError for an invalid repository name."""
        validate_repo_id(repo_id)
        if "/" not in repo_id:
            raise ValueError(
                f"got repo_id {repo_id!r}, expected a namespace too, as in 'you/{repo_id}'"
            )
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="sa_zoo")
        self.repo_id = repo_id
        self.place: dict[str, Any] = {"repo_id": repo_id, "repo_type": self.kind}
        self.url = f"{self.api.endpoint}/{self.folder}{repo_id}"
        self.files: Manifest = {}  # to publish

    @retried("write to the repository")
    def create(self, private: bool) -> None:
        """Create the repository if it does not exist.

        Raises PermissionError if the token may not write there, or if `private` and the repository is public.
        """
        token = get_token()
        if not token or not token.isascii():
            raise PermissionError(f"no usable token: {LOG_IN}")
        # exist_ok would hide why a Hub refuses an existing one
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
    def look(self, commit: str, others: set[str] | None = None) -> State:
        """Compare a commit with `files`, ignoring `others`; default: all files not from this package.

        A repository without a list of published files belongs to somebody else, unless it is empty or unchanged since
        the Hub created it.
        """
        tree = self._tree(commit)
        in_the_way = set()
        if others is None:
            listed = self._listed(commit) if PUBLISHED in tree else {}
            mine = {name for name in listed if tree.get(name) in listed[name].values()}
            others = tree.keys() - mine
            if listed:
                others.discard(PUBLISHED)
                in_the_way = others & self.files.keys()
            elif others and others <= self.example and self._is_new(commit):
                others = set()
            else:
                in_the_way = others
        ours = {name: digests(content).values() for name, content in self.files.items()}
        differing = {name for name in ours if tree.get(name) not in ours[name]}
        differing |= tree.keys() - ours.keys() - others
        return State(commit, others, sorted(in_the_way), ", ".join(sorted(differing)))

    def check_free(self, state: State) -> None:
        """Raise Refused if files of others are in the way of ours."""
        if state.in_the_way:
            same = sorted(state.others & self.files.keys())
            raise Refused(
                f"got {self.url}, which holds {', '.join(state.in_the_way)}, "
                "expected an empty repository or one that sa_zoo published: nothing was changed; "
                "choose a new --repo-id, or add --merge, which replaces "
                f"{', '.join(same) or 'none of its files'} and keeps all others"
            )

    def update(self, state: State) -> str:
        """Commit our files on top of `state` if they differ, keeping those of others; return main's commit."""
        if not state.differing:
            return state.commit
        commit = self._commit(state)
        differing = self.look(commit, state.others).differing
        if differing:
            raise Refused(
                f"{self.url} at {commit} is not what was sent ({differing}): "
                "somebody else may be writing there: look at it, then run this again"
            )
        return commit

    @retried("commit")
    def _commit(self, state: State) -> str:
        """Set the tree to our files and those of others, in one commit on top of `state`; return main's commit.

        If main has moved, nothing is committed: either the answer to an earlier attempt was lost, or somebody else
        committed. `look` tells which.
        """
        head = str(self.api.repo_info(**self.place).sha)
        if head != state.commit:
            return head
        left = sorted(self._tree(head).keys() - self.files.keys() - state.others)
        added = [CommitOperationAdd(name, content) for name, content in self.files.items()]
        committed = self.api.create_commit(
            **self.place,
            operations=[*added, *map(CommitOperationDelete, left)],
            commit_message="Publish with sa_zoo",
            parent_commit=head,
        )
        return committed.oid

    @retried("download what was committed")
    def download(self, commit: str, cache: str) -> Path:
        return Path(self.api.snapshot_download(**self.place, revision=commit, cache_dir=cache))

    @retried("tag")
    def tag(self, name: str, commit: str) -> None:
        """Tag a commit. An existing tag stays: it may be from an earlier attempt with a lost answer."""
        self.api.create_tag(**self.place, tag=name, revision=commit, exist_ok=True)

    def _tree(self, commit: str) -> dict[str, str]:
        """Path -> one of the `digests` of each file of a commit."""
        listed = self.api.list_repo_tree(**self.place, recursive=True, revision=commit)
        files = [file for file in listed if isinstance(file, RepoFile)]
        tree = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
        tree.pop(".gitattributes", None)  # the Hub itself writes it when it creates a repository
        return tree

    def _listed(self, commit: str) -> dict[str, dict[str, str]]:
        """Path -> digests of the files published by this package, as listed in a commit."""
        with TemporaryDirectory() as cache:
            path = self.api.hf_hub_download(
                **self.place, filename=PUBLISHED, revision=commit, cache_dir=cache
            )
            return published_files(Path(path).read_bytes())

    def _is_new(self, commit: str) -> bool:
        """Whether a commit is the first one, made by the Hub."""
        commits = self.api.list_repo_commits(**self.place, revision=commit)
        return [each.title for each in commits] == ["initial commit"]


class Space(Remote):
    """A static Space."""

    kind = "space"
    folder = "spaces/"
    settings: ClassVar[dict[str, Any]] = {"space_sdk": "static"}
    example: ClassVar[set[str]] = {"README.md", "index.html", "style.css"}


def _hub_error(error: BaseException | None) -> Exception | None:
    """The HTTP or network error in the chain of causes of `error`: the client wraps some of them."""
    while error:
        if isinstance(error, (HTTPError, ConnectionError)):  # Xet storage raises ConnectionError
            return error
        error = error.__cause__
    return None


def _explained(remote: Remote, doing: str, error: Exception) -> tuple[Exception, float]:
    """The exception to raise, with the failed step, reason and remedy; and the seconds to wait, if the Hub asks."""
    kind, advice = NO_ANSWER
    reason = str(error)
    asked = ""
    if isinstance(error, HfHubHTTPError):
        response = error.response
        status = response.status_code
        kind, advice = ADVICE.get(status, ADVICE[400 if status < 500 else 500])
        reason = f"HTTP {status}: {error.server_message or response.reason_phrase}"
        asked = response.headers.get("Retry-After", "")
    why = f"{advice.format(repo_id=remote.repo_id)} ({reason})"
    message = f"could not {doing} at {remote.url}: {why}"
    token = get_token()
    if token:  # a client quotes an unsendable header, a server may quote its input
        message = message.replace(token, "<token>")
    # Retry-After can also be a date
    return kind(message), float(asked) if asked.isdecimal() else 0.0
