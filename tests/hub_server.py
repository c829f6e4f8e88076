"""A small Hub on 127.0.0.1: the part of the protocol that publishing uses, plain LFS included, and faults on demand.

The official client talks to it as to huggingface.co: repositories, commits as NDJSON, trees with git's sha1 and LFS's
sha256, tags, downloads. It keeps everything in memory and believes one token.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from hub_routes import ROUTES, USER, Problem, Repository

WRITING = r"(POST|PUT) (?!.*(validate-yaml|preupload|batch))"
TOKEN = "hf_" + "t" * 34


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD path" matches.

    kind: "drop" (closed before anything happens), "lose" (done, then closed without an answer), "cut" (closed after the
    share `at` of the answer), "flip" (one bit of the answer, there), "slow" (an answer after 1/3 second), or an
    HTTP status to answer instead.
    """

    pattern: str
    kind: str | int
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    at: float = 0.5


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.before: dict[
            str, Callable[[], None]
        ] = {}  # pattern -> what somebody else does just before, once
        self.log: list[str] = []
        self.lock = threading.RLock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.log)

    def writes(self) -> list[str]:
        """Requests that changed something, or tried."""
        return [line for line in self.log if re.match(WRITING, line)]

    def fault_for(self, line: str) -> Fault | None:
        with self.lock:
            for pattern in [pattern for pattern in self.before if re.search(pattern, line)]:
                self.before.pop(pattern)()
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body, line = self.read_body(), f"{self.command} {path}"
        self.server.log.append(line)
        fault = self.server.fault_for(line)
        if fault and fault.kind == "drop":
            return self.hang_up()
        try:
            if fault and isinstance(fault.kind, int):
                raise Problem(
                    fault.kind, f"as the test wished for {self.headers.get('Authorization')}"
                )
            with self.server.lock:
                status, headers, answer = 200, *self.answer(path, body)
        except Problem as problem:
            status, headers, answer = problem.status, problem.headers, problem.body
            headers |= fault.headers if fault else {}
        if fault and fault.kind == "lose":
            return self.hang_up()
        if fault and fault.kind == "slow":
            time.sleep(1 / 3)
        place = int(len(answer) * fault.at) if fault else 0
        if fault and fault.kind == "flip" and answer:
            answer = answer[:place] + bytes([answer[place] ^ 1]) + answer[place + 1 :]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if fault and fault.kind == "cut":
            self.wfile.write(answer[:place])
            return self.hang_up()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, path: str, body: bytes) -> tuple[dict[str, str], bytes]:
        for pattern, respond in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                repo = found.groupdict().get("repo")
                if self.command in ("POST", "PUT") or not self.readable(repo):
                    self.authorise(repo)
                made = respond(self, body, **found.groupdict())
                if isinstance(made, tuple):
                    return made
                return {"Content-Type": "application/json"}, json.dumps(made).encode()
        raise Problem(404, f"no such route: {self.command} {path}")

    def authorise(self, repo: str | None) -> None:
        if self.path.startswith("/lfs/"):  # a signed URL of a storage needs no token
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Problem(401, "Invalid credentials in Authorization header")
        if repo and repo.removeprefix("spaces/").split("/")[0] != USER:
            raise Problem(403, f"you have no write access to {repo}")

    def readable(self, repo: str | None) -> bool:
        return repo not in self.server.repositories or not self.server.repositories[repo].private

    def repository(self, repo: str) -> Repository:
        if repo not in self.server.repositories:
            raise Problem(404, "Repository not found", "RepoNotFound")
        return self.server.repositories[repo]

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repository = self.repository(repo)
        commit = repository.at(revision)
        if commit not in repository.commits:
            raise Problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repository.commits[commit]

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args: object) -> None:
        """Silence."""
