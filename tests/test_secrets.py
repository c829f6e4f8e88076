"""A token is sent to its Hub, in one header, and goes nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

from hub_server import TOKEN, HubServer

ROOT = Path(__file__).parents[1]
STORED = "hf_" + "s" * 34  # in the client's store, where `hf auth login` puts it

# Trains and publishes with every logger at debug level, the client's HTTP included.
TRAIN_AND_PUBLISH = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
import transformers.utils.logging, huggingface_hub.utils.logging
transformers.utils.logging.set_verbosity_debug()
huggingface_hub.utils.logging.set_verbosity_debug()
from sa_zoo.cli import app
small = ["--set", "model.args={ depth = 1, embed_dim = 7, hidden_dim = 11, num_heads = 2 }", "--set", "train.epochs=1"]
app(["train", "quickstart", "--out", "run", *small], standalone_mode=False)
app(["publish", "run", "--repo-id", "you/tiny", "--tag", "v1"])
"""


def test_a_token_reaches_the_hub_in_its_header_and_nothing_else(tmp_path):
    """One token is in the environment and another in the client's store."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(STORED)
    with HubServer() as hub:
        settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_DEBUG": "1"}
        settings |= {"PYTHONPATH": str(ROOT), "HF_TOKEN": TOKEN}
        done = subprocess.run(
            [sys.executable, "-c", TRAIN_AND_PUBLISH],
            env=os.environ | settings,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.repositories["you/tiny"].tags and "DEBUG" in done.stderr
    (home / "token").unlink()
    written = [
        path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()
    ]
    texts = [done.stdout, done.stderr, *hub.seen, *written]
    assert not any(token in text for token in (TOKEN, STORED) for text in texts)
