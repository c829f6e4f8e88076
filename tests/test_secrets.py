"""A token is sent to its Hub, in one header, and goes nowhere else."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from hub_server import TOKEN, Handler, HubServer
from model_folders import make_run

ROOT = Path(__file__).parents[1]
STORED = "hf_" + "s" * 34  # in the client's store, where `hf auth login` puts it

# Publishes with every logger at debug level, the client's HTTP included, and shows argv.
PUBLISH = """
import logging, os, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
import transformers.utils.logging, huggingface_hub.utils.logging
transformers.utils.logging.set_verbosity_debug()
huggingface_hub.utils.logging.set_verbosity_debug()
import sa_zoo
from sa_zoo.cli import app
print(sys.argv, open(f"/proc/{os.getpid()}/cmdline").read(), file=sys.stderr)
app(["publish", sys.argv[1], "--repo-id", "you/test-vit", "--tag", "v1"])
"""


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another host (another port of this one, by another name): keeps what it is sent, and serves the file."""

    def do_GET(self):
        self.server.seen.append(str(self.headers))
        content = self.server.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *args):
        """Silence."""


class Recording(Handler):
    """The Hub, which keeps what it is sent apart from the Authorization header, and redirects downloads of weights."""

    def handle_any(self):
        elsewhere = getattr(self.server, "elsewhere", None)
        headers = [f"{key}: {value}" for key, value in self.headers.items() if key.lower() != "authorization"]
        self.server.seen.append(f"{self.path} {headers}")
        self.server.authorized += "Authorization" in self.headers
        if elsewhere and self.command == "GET" and re.search(r"/resolve/.*/model\.safetensors", self.path):
            repository = self.server.repositories["you/test-vit"]
            elsewhere.content = repository.commits[repository.head]["model.safetensors"]
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{elsewhere.server_port}/weights")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        super().handle_any()

    def read_body(self):
        body = super().read_body()
        self.server.seen.append(body.decode("latin-1"))
        return body

    do_GET = do_HEAD = do_POST = do_PUT = handle_any


def publish_watched(place: Path, stored: str, **variables: str) -> tuple[HubServer, dict[str, str]]:
    """Publish in a process of its own, with a token in the client's store and others in environment variables.

    Returns the Hub, and every text that left the process, by where it was found.
    """
    run, home = make_run(place / "test_vit", "test_vit", num_classes=7), place / "home"
    home.mkdir()
    (home / "token").write_text(stored)
    elsewhere = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    elsewhere.seen, elsewhere.content = [], b""
    threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
    hub = HubServer()
    hub.RequestHandlerClass, hub.elsewhere, hub.seen, hub.authorized = Recording, elsewhere, [], 0
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_DEBUG": "1"}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, str(run)], env=environment, cwd=place, capture_output=True, text=True
    )
    for server in (hub, elsewhere):
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DEBUG" in done.stderr and hub.authorized > 5 and elsewhere.seen
    (home / "token").unlink()
    commits = [str(commit) for repository in hub.repositories.values() for commit in repository.commits.values()]
    texts = {"output": done.stdout, "log": done.stderr, "requests": " ".join(hub.seen), "commits": " ".join(commits)}
    texts["requests to another host"] = " ".join(elsewhere.seen)
    return hub, texts | {str(path): path.read_bytes().decode("latin-1") for path in place.rglob("*") if path.is_file()}


def test_a_token_reaches_the_hub_in_its_header_and_nothing_else(tmp_path):
    hub, texts = publish_watched(tmp_path, STORED, HF_TOKEN=TOKEN)
    assert hub.repositories["you/test-vit"].tags
    assert "authorization" not in texts["requests to another host"].lower()
    assert not [where for where, text in texts.items() if TOKEN in text or STORED in text]


def test_a_token_is_in_no_file_of_a_run_and_in_no_log(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(STORED)
    code = "import logging; logging.basicConfig(level=logging.DEBUG)\nfrom sa_zoo.cli import app; app()"
    small = "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }"
    arguments = ["train", "quickstart", "--out", "run", "--set", small, "--set", "train.epochs=1"]
    environment = {**os.environ, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]["n"]
    (home / "token").unlink()
    texts = [done.stdout, done.stderr]
    texts += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret in text for secret in (TOKEN, STORED) for text in texts)
