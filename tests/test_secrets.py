"""A token is sent to its Hub, in one header, and goes nowhere else."""

import os
import subprocess
import sys
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


class Recording(Handler):
    """The Hub, which keeps what it is sent apart from the Authorization header."""

    def handle_any(self):
        headers = [
            f"{key}: {value}"
            for key, value in self.headers.items()
            if key.lower() != "authorization"
        ]
        self.server.seen.append(f"{self.path} {headers}")
        self.server.authorized += "Authorization" in self.headers
        super().handle_any()

    def read_body(self):
        body = super().read_body()
        self.server.seen.append(body.decode("latin-1"))
        return body

    do_GET = do_HEAD = do_POST = do_PUT = handle_any


def test_a_token_reaches_the_hub_in_its_header_and_nothing_else(tmp_path):
    """One token is in the environment and another in the client's store."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(STORED)
    hub = HubServer()
    hub.RequestHandlerClass, hub.seen, hub.authorized = Recording, [], 0
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
    hub.shutdown()
    hub.server_close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.repositories["you/tiny"].tags and hub.authorized > 5 and "DEBUG" in done.stderr
    (home / "token").unlink()
    commits = [
        str(commit)
        for repository in hub.repositories.values()
        for commit in repository.commits.values()
    ]
    texts = {
        "output": done.stdout,
        "log": done.stderr,
        "sent": " ".join([*hub.seen, *commits]),
    }
    texts |= {
        str(path): path.read_bytes().decode("latin-1")
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert not [where for where, text in texts.items() if TOKEN in text or STORED in text]
