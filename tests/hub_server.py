"""A small Hub on 127.0.0.1 for the official client: repositories, commits, trees, tags, downloads, faults on demand.

It keeps everything in memory, stores no file as LFS, and believes one token, of the user "you".
"""

import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 34
DATE = "2020-02-20T20:20:20.000Z"


class Problem(Exception):
    """An HTTP status to answer."""


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)  # path -> title of the last commit to it
    tags: dict[str, str] = field(default_factory=dict)
    head: str = ""

    def commit(self, files: dict[str, bytes], title: str = "Upload by hand") -> str:
        before = self.commits.get(self.head, {})
        self.titles |= {path: title for path in files if files[path] != before.get(path)}
        self.head = sha1(f"{self.head}{sorted(files)}".encode()).hexdigest()
        self.commits[self.head] = files
        return self.head

    def at(self, revision: str) -> str:
        return {"main": self.head, **self.tags}.get(revision, revision)


class HubServer(ThreadingHTTPServer):
    """faults: pattern of "METHOD path" -> what happens to the next such request, once.

    "lose": it is done, then closed unanswered; a number: the HTTP status to answer; a function: called first.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, str | int | Callable[[], Any]] = {}
        self.log: list[str] = []  # METHOD path
        self.seen: list[str] = []  # headers, apart from that of the token, and bodies
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.log)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.token = self.headers.get("Authorization")
        del self.headers["Authorization"]
        self.server.seen.append(f"{self.path} {self.headers} {body.decode('latin-1')}")
        line = f"{self.command} {unquote(urlsplit(self.path).path)}"
        self.server.log.append(line)
        pattern = next((each for each in self.server.faults if re.search(each, line)), "")
        fault = self.server.faults.pop(pattern, None)
        if callable(fault):
            fault()
        status = 200
        headers = {"Content-Type": "application/json"}
        try:
            if isinstance(fault, int):
                raise Problem(fault)
            answer = self.answer(line, body, headers)
        except Problem as problem:
            status = problem.args[0]
            headers["X-Error-Code"] = "EntryNotFound"
            answer = json.dumps({"url": f"{self.server.url}/you/it"}).encode()
        if fault == "lose":
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = handle_any

    def answer(self, line: str, body: bytes, headers: dict[str, str]) -> bytes:
        route = next((each for each in ROUTES if re.fullmatch(each, line)), "")
        found: Any = re.fullmatch(route, line)
        if not route:
            raise Problem(404)
        place = found.groupdict()
        request = [json.loads(part) for part in body.splitlines()]
        if not place:
            return json.dumps(ROUTES[route](self, request)).encode()
        repository = self.server.repositories.get(place.pop("repo"))
        if repository is None:
            raise Problem(404)
        if self.command == "POST":
            self.authorize(found["repo"])
        made = ROUTES[route](repository, request, **place)
        if isinstance(made, bytes):
            headers |= {"X-Repo-Commit": repository.at(place["revision"]), "ETag": git_sha1(made)}
            return made
        return json.dumps(made).encode()

    def authorize(self, repo: str) -> None:
        if self.token != f"Bearer {TOKEN}":
            raise Problem(401)
        if not repo.startswith("you/"):
            raise Problem(403)

    def log_message(self, *args: object) -> None:
        """Silence."""


def git_sha1(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()


def create(handler: Handler, request: list[Any]) -> Any:
    server = handler.server
    wanted = request[0]
    files = {".gitattributes": b"*"}
    repo = f"{wanted['organization']}/{wanted['name']}"
    handler.authorize(repo)
    if repo in server.repositories:
        raise Problem(409)
    server.repositories[repo] = Repository(wanted["visibility"] == "private")
    server.repositories[repo].commit(files, "initial commit")
    return {"url": f"{server.url}/{repo}"}


def info(repository: Repository, _: Any, revision: str = "main") -> Any:
    sha = repository.at(revision)
    siblings = [{"rfilename": path} for path in repository.commits[sha]]
    return {"id": "it", "sha": sha, "private": repository.private, "siblings": siblings}


def tree(repository: Repository, _: Any, revision: str) -> Any:
    return [
        {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
        | {"lastCommit": {"id": "0", "title": repository.titles[path], "date": DATE}}
        for path, content in repository.commits[repository.at(revision)].items()
    ]


def preupload(_: Repository, request: list[Any]) -> Any:
    plain = {"uploadMode": "regular", "shouldIgnore": False}
    return {"files": [{"path": file["path"], **plain} for file in request[0]["files"]]}


def commit(repository: Repository, request: list[Any]) -> Any:
    header, *operations = request
    if header["value"]["parentCommit"] != repository.head:
        raise Problem(412)
    files = dict(repository.commits[repository.head])
    for operation in operations:
        value = operation["value"]
        if operation["key"] == "deletedFile":
            del files[value["path"]]
        else:
            files[value["path"]] = base64.b64decode(value["content"])
    sha = repository.head
    if files != repository.commits[sha]:
        sha = repository.commit(files, header["value"]["summary"])
    return {
        "success": True,
        "commitOid": sha,
        "commitUrl": f"https://huggingface.co/you/it/commit/{sha}",
    }


def refs(repository: Repository, _: Any) -> Any:
    tags = [
        {"name": name, "ref": f"refs/tags/{name}", "targetCommit": sha}
        for name, sha in repository.tags.items()
    ]
    return {"branches": [], "converts": [], "tags": tags}


def tag(repository: Repository, request: list[Any], revision: str) -> Any:
    if request[0]["tag"] in repository.tags:
        raise Problem(409)
    repository.tags[request[0]["tag"]] = revision
    return {}


def resolve(repository: Repository, _: Any, revision: str, path: str) -> bytes:
    files = repository.commits[repository.at(revision)]
    if path not in files:
        raise Problem(404)
    return files[path]


REPO = r"(?P<repo>[^/]+/[^/]+)"
API = f"/api/models/{REPO}"
REVISION = r"(?P<revision>[^/]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    "POST /api/repos/create": create,
    "POST /api/validate-yaml": lambda *_: {"errors": [], "warnings": []},
    f"GET {API}/auth-check/write": lambda *_: {},
    f"GET {API}": info,
    f"GET {API}/revision/{REVISION}": info,
    f"GET {API}/tree/{REVISION}": tree,
    f"POST {API}/preupload/main": preupload,
    f"POST {API}/commit/main": commit,
    f"GET {API}/refs": refs,
    f"POST {API}/tag/{REVISION}": tag,
    f"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<path>.+)": resolve,
}
