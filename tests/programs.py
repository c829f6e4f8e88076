"""Programs of the system that tests use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In every Python process of a command, workers included: a request for an address or a connection is written down.
WATCH = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        if not (event == "socket.connect" and isinstance(arguments[1], (str, bytes))):  # between processes
            with open(os.environ["WATCHED"], "a") as log:
                log.write(f"{event} {arguments[1:] if event == 'socket.connect' else arguments}\\n")

sys.addaudithook(watch)
"""


def missing_programs() -> str:
    """What a machine without a browser has to install; empty if it has one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not missing:
        return ""
    return f"{' and '.join(missing)} not found; apt-get install chromium chromium-driver"


def without_network(*command: str) -> list[str]:
    """The command in a network namespace of its own, where the system allows it."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if (
        shutil.which("unshare")
        and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    ):
        return [*unshare, *command]
    return list(command)


def watched(folder: Path, code: str, **variables: str) -> tuple[str, str]:
    """Run code without a network, where the system allows it; the addresses that it asked for, and what it printed."""
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    log = folder / "watch" / "log"
    log.touch()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"PYTHONPATH": f"{folder / 'watch'}:{ROOT}", "HF_HOME": str(folder / "home")}
    environment |= {"WATCHED": str(log)} | variables
    command = without_network(sys.executable, "-c", code)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return log.read_text(), done.stdout
