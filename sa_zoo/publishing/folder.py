"""A model folder before it leaves the machine: its manifest, and the checks that need no network.

A folder that passes `check_folder` holds safetensors weights, loads by timm and by transformers with equal logits,
and has a card whose numbers are those of its `metrics.json`.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from huggingface_hub import get_token

from sa_zoo.publishing.card import check_card

REQUIRED = ("config.json", "metrics.json", "model.safetensors")
# Only these leave the machine: whatever else a run leaves behind (optimiser state, logs, pickles) stays at home.
PUBLISHED = (
    *REQUIRED,
    "README.md",
    "LICENSE",
    "preprocessor_config.json",
    "train.toml",
    "history.jsonl",
    "heads.safetensors",
    "*.py",
    "figures/*.png",
)
# Hugging Face, GitHub, OpenAI-like, Slack and AWS keys, and PEM private keys.
SECRET = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    rb"|sk-[A-Za-z0-9_-]{32,}|xox[abpr]-[A-Za-z0-9-]{20,}|AKIA[A-Z0-9]{16})\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
# First bytes of a pickle (protocol 2 and later) and of a zip archive, which is what torch.save writes.
PICKLE_STARTS = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")


@dataclass(frozen=True)
class File:
    """One file of the manifest: size in bytes, sha256 of the bytes, and git's own name (sha1) of the blob."""

    size: int
    sha256: str
    git_sha1: str


Manifest = dict[str, File]


def read_manifest(folder: Path) -> Manifest:
    """Path in the repository -> File, sorted by path, for every file of the folder that is published."""
    paths = sorted({path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()})
    return {path.relative_to(folder).as_posix(): _hashed(path) for path in paths}


def left_behind(folder: Path) -> list[str]:
    """Top-level names of the folder that are not published."""
    sent = {name.split("/")[0] for name in read_manifest(folder)}
    return sorted(path.name for path in folder.iterdir() if path.name not in sent)


def check_complete(folder: Path) -> None:
    """Raises ValueError where the folder lacks what only training or conversion can give."""
    if not folder.is_dir():
        raise ValueError(f"got {folder}, which is no folder, expected the folder of a finished run")
    if missing := [name for name in REQUIRED if not (folder / name).is_file()]:
        raise ValueError(
            f"got {folder} without {', '.join(missing)}, expected the folder of a finished run; "
            f"`sa-zoo evaluate {folder} --data NAME --json {folder}/metrics.json` measures a converted model"
        )


def check_folder(folder: Path, repo_id: str) -> tuple[Manifest, torch.Tensor]:
    """The manifest of a complete folder and its logits, after every check that needs no network.

    Raises ValueError that names the file, what is wrong with it and what to do.
    """
    manifest = read_manifest(folder)
    for name in manifest:
        _check_contents(folder / name)
    if "num_classes" in json.loads((folder / "config.json").read_text()).get("model_args", {}):
        raise ValueError("got num_classes in config.json's model_args, expected it outside: transformers refuses it")
    check_card(folder, repo_id)
    logits = check_loads(f"local-dir:{folder}", folder, {})
    return manifest, logits


def check_loads(timm_name: str, transformers_name: str | Path, where: dict) -> torch.Tensor:
    """Load by timm and by transformers, and return the logits (2, classes) on which they agree.

    timm_name: "local-dir:..." or "hf-hub:...@commit". where: keyword arguments that tell transformers the commit.
    Raises ValueError where the two differ by more than rounding.
    """
    from transformers import AutoModelForImageClassification  # seconds to import; rendering a card needs none of it

    by_timm = timm.create_model(timm_name, pretrained=True, cache_dir=where.get("cache_dir")).eval()
    by_transformers = AutoModelForImageClassification.from_pretrained(
        transformers_name, trust_remote_code=False, use_safetensors=True, **where
    ).eval()
    images = torch.randn(2, *by_timm.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits, others = by_timm(images), by_transformers(pixel_values=images).logits
    if logits.shape != others.shape or not torch.allclose(logits, others, rtol=1e-5, atol=1e-5):
        raise ValueError(
            f"got different logits from timm and transformers for {transformers_name}: {logits[0]} and {others[0]}"
        )
    return logits


def _check_contents(path: Path) -> None:
    content = path.read_bytes()
    if content.startswith(PICKLE_STARTS):
        raise ValueError(f"got a pickle or an archive in {path}, expected none: weights are safetensors only")
    token = (get_token() or "").encode()
    found = SECRET.search(content) or (token and re.search(re.escape(token), content))
    if found:
        raise ValueError(f"got what looks like a token in {path}, byte {found.start()}: remove it and revoke it")


def _hashed(path: Path) -> File:
    content = path.read_bytes()
    blob = b"blob %d\0" % len(content) + content
    return File(
        len(content), hashlib.sha256(content).hexdigest(), hashlib.sha1(blob, usedforsecurity=False).hexdigest()
    )
