"""What a Hub answers: the routes that publishing uses, on repositories in memory."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hub_server import Handler

USER = "you"


@dataclass
class Repository:
    """Commits are {path: bytes}; a path ending like weights is an LFS file, as .gitattributes has it on the Hub."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes]) -> str:
        self.head = hashlib.sha1(
            f"{self.head}{len(self.commits)}{sorted(files)}".encode()
        ).hexdigest()
        self.commits[self.head] = files
        return self.head

    def at(self, revision: str) -> str:
        return self.head if revision == "main" else self.tags.get(revision, revision)


class Problem(Exception):
    def __init__(self, status: int, message: str, code: str = "", **extra: str) -> None:
        self.status = status
        self.headers = {"X-Error-Message": message, "X-Error-Code": code}
        self.body = json.dumps({"error": message, **extra}).encode()


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def create(handler: "Handler", body: bytes) -> object:
    request = json.loads(body)
    repo = f"{request['organization'] or USER}/{request['name']}"
    handler.authorise(repo)
    files = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
    if request.get("type") == "space":
        if request.get("sdk") != "static":
            raise Problem(400, f"sdk: got {request.get('sdk')}")
        repo = f"spaces/{repo}"
        files |= {"README.md": b"an example", "index.html": b"<h1>", "style.css": b"h1 {}"}
    url = f"{handler.server.url}/{repo}"
    if repo in handler.server.repositories:
        raise Problem(409, "You already created this model repo", url=url)
    repository = handler.server.repositories[repo] = Repository(
        private=request.get("visibility") == "private"
    )
    repository.commit(files)
    return {"url": url}


def info(handler: "Handler", body: bytes, repo: str, revision: str = "main") -> object:
    commit, files = handler.files(repo, revision)
    siblings = [{"rfilename": path} for path in files]
    return {
        "id": repo,
        "sha": commit,
        "private": handler.repository(repo).private,
        "tags": [],
        "siblings": siblings,
    }


def may_write(handler: "Handler", body: bytes, repo: str) -> object:
    handler.repository(repo)
    handler.authorise(repo)
    return {}


def preupload(handler: "Handler", body: bytes, repo: str, revision: str) -> object:
    _, files = handler.files(repo, revision)
    answers = []
    for path in (request["path"] for request in json.loads(body)["files"]):
        mode, oid = ("lfs", sha256) if is_lfs(path) else ("regular", git_sha1)
        known = {"oid": oid(files[path])} if path in files else {}
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
    return {"files": answers}


def lfs_batch(handler: "Handler", body: bytes, repo: str) -> object:
    objects = json.loads(body)["objects"]
    for request in objects:
        if request["oid"] not in handler.server.objects:
            url = handler.server.url
            request["actions"] = {"upload": {"href": f"{url}/lfs/{request['oid']}"}}
    return {"objects": objects, "transfer": "basic"}


def lfs_put(handler: "Handler", body: bytes, oid: str) -> object:
    if sha256(body) != oid:
        raise Problem(400, "contents do not have this oid")
    handler.server.objects[oid] = body
    return {}


def commit(handler: "Handler", body: bytes, repo: str, revision: str) -> object:
    repository = handler.repository(repo)
    header, *lines = [json.loads(line) for line in body.splitlines()]
    if header["value"].get("parentCommit", repository.head) != repository.head:
        raise Problem(412, "A commit has happened since. Please refresh and try again.")
    files = dict(repository.commits[repository.head])
    for key, value in ((line["key"], line["value"]) for line in lines):
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = handler.server.objects[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            raise Problem(400, f"unknown operation {key}")
    sha = repository.commit(files)
    url = f"{handler.server.url}/{repo}/commit/{sha}"
    return {"success": True, "commitOid": sha, "commitUrl": url}


def tree(handler: "Handler", body: bytes, repo: str, revision: str) -> object:
    _, files = handler.files(repo, revision)
    entries = []
    for path, content in files.items():
        entry: dict[str, object] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": git_sha1(content),
        }
        if is_lfs(path):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return entries


def commits(handler: "Handler", body: bytes, repo: str, revision: str) -> object:
    """Newest first; the first one is the Hub's own."""
    titles = ["Publish"] * (len(handler.repository(repo).commits) - 1)
    same = {"id": "0" * 40, "message": "", "date": "2020-02-20T20:20:20.000Z", "authors": []}
    return [{"title": title, **same} for title in [*titles, "initial commit"]]


def refs(handler: "Handler", body: bytes, repo: str) -> object:
    repository = handler.repository(repo)
    tags = [
        {"name": name, "ref": f"refs/tags/{name}", "targetCommit": sha}
        for name, sha in repository.tags.items()
    ]
    main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.head}
    return {"branches": [main], "converts": [], "tags": tags}


def tag(handler: "Handler", body: bytes, repo: str, revision: str) -> object:
    name, (sha, _) = json.loads(body)["tag"], handler.files(repo, revision)
    if name in handler.repository(repo).tags:
        raise Problem(409, f"reference {name} exists already")
    handler.repository(repo).tags[name] = sha
    return {}


def resolve(
    handler: "Handler", body: bytes, repo: str, revision: str, path: str
) -> tuple[dict[str, str], bytes]:
    sha, files = handler.files(repo, revision)
    if path not in files:
        raise Problem(404, "Entry not found", "EntryNotFound")
    content = files[path]
    etag = sha256(content) if is_lfs(path) else git_sha1(content)
    return {
        "X-Repo-Commit": sha,
        "ETag": f'"{etag}"',
        "Content-Type": "application/octet-stream",
    }, content


# A Space is at spaces/OWNER/NAME, in repositories too.
REPO, REVISION = r"(?P<repo>(?:spaces/)?[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
API = rf"/api/(?:models/|(?=spaces/)){REPO}"
ROUTES = {
    "POST /api/repos/create": create,
    "POST /api/validate-yaml": lambda handler, body: {"errors": [], "warnings": []},
    f"GET {API}": info,
    f"GET {API}/auth-check/write": may_write,
    f"GET {API}/revision/{REVISION}": info,
    f"POST {API}/preupload/{REVISION}": preupload,
    f"POST /{REPO}\\.git/info/lfs/objects/batch": lfs_batch,
    "PUT /lfs/(?P<oid>[0-9a-f]{64})": lfs_put,
    f"POST {API}/commit/{REVISION}": commit,
    f"GET {API}/tree/{REVISION}": tree,
    f"GET {API}/commits/{REVISION}": commits,
    f"GET {API}/refs": refs,
    f"POST {API}/tag/{REVISION}": tag,
    f"(GET|HEAD) /{REPO}/resolve/{REVISION}/(?P<path>.+)": resolve,
}
