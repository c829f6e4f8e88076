"""Hardware, versions and settings of a measurement."""

import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch
from torch.backends import cuda, cudnn

ARCHIVED = "$Format:%H$"  # `git archive` puts the commit here


def environment(device: torch.device) -> dict[str, str | int]:
    """Hardware, versions and settings of a measurement."""
    name = device.type
    settings = {}
    if name == "cuda":
        name = torch.cuda.get_device_name(device)
        settings["tf32_products"] = str(cuda.matmul.allow_tf32)
        settings["tf32_convolutions"] = str(cudnn.allow_tf32)
    packages = ("torch", "timm", "accelerate", "datasets", "numpy")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "device": name,
        **settings,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "sa_zoo_commit": _own_commit(),
    }


def _cpu() -> str:
    """Number and name of the cores, or the architecture if the system does not list cores."""
    listed = Path("/proc/cpuinfo")
    if listed.is_file():
        cores = re.findall(r"^model name\s*:\s*(.*)$", listed.read_text(), re.MULTILINE)
        if cores:
            return f"{len(cores)} x {cores[0]}"
    return platform.machine()


def _own_commit() -> str:
    """The commit of a checkout or of a git archive; empty for an installed package."""
    checkout = Path(__file__).parents[2]
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return "" if ARCHIVED.startswith("$") else ARCHIVED
    command = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()
