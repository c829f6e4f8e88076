"""A token is sent to its Hub, in one header, and goes nowhere else."""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from hub_server import TOKEN, Handler, HubServer

ROOT = Path(__file__).parents[1]
STORED = "hf_" + "s" * 34  # in the client's store, where `hf auth login` puts it

# Trains and publishes with every logger at debug level, the client's HTTP included, and shows argv.
TRAIN_AND_PUBLISH = """
import logging, os, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
import transformers.utils.logging, huggingface_hub.utils.logging
transformers.utils.logging.set_verbosity_debug()
huggingface_hub.utils.logging.set_verbosity_debug()
import sa_zoo
from sa_zoo.cli import app
print(sys.argv, open(f"/proc/{os.getpid()}/cmdline").read(), file=sys.stderr)
small = ["--set", "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }", "--set", "train.epochs=1"]
app(["train", "quickstart", "--out", "run", *small], standalone_mode=False)
app(["publish", "run", "--repo-id", "you/tiny", "--tag", "v1"])
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
        headers = [
            f"{key}: {value}"
            for key, value in self.headers.items()
            if key.lower() != "authorization"
        ]
        self.server.seen.append(f"{self.path} {headers}")
        self.server.authorized += "Authorization" in self.headers
        if (
            elsewhere
            and self.command == "GET"
            and re.search(r"/resolve/.*/model\.safetensors", self.path)
        ):
            repository = self.server.repositories["you/tiny"]
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


def test_a_token_reaches_the_hub_in_its_header_and_nothing_else(tmp_path):
    """One token is in the environment and another in the client's store; the Hub redirects a download elsewhere."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(STORED)
    elsewhere = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    elsewhere.seen, elsewhere.content = [], b""
    threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
    hub = HubServer()
    hub.RequestHandlerClass, hub.elsewhere, hub.seen, hub.authorized = Recording, elsewhere, [], 0
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
    }
    environment |= {
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1",
    }
    environment |= {"PYTHONPATH": str(ROOT), "HF_TOKEN": TOKEN}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_PUBLISH],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    for server in (hub, elsewhere):
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        hub.repositories["you/tiny"].tags
        and hub.authorized > 5
        and elsewhere.seen
        and "DEBUG" in done.stderr
    )
    assert "authorization" not in " ".join(elsewhere.seen).lower()
    (home / "token").unlink()
    commits = [
        str(commit)
        for repository in hub.repositories.values()
        for commit in repository.commits.values()
    ]
    texts = {
        "output": done.stdout,
        "log": done.stderr,
        "sent": " ".join([*hub.seen, *elsewhere.seen, *commits]),
    }
    texts |= {
        str(path): path.read_bytes().decode("latin-1")
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert not [where for where, text in texts.items() if TOKEN in text or STORED in text]
