"""A model folder before it is published: its manifest, and the checks that need no network.

A folder that passes `check_folder` holds safetensors weights and loads by timm and by transformers with equal logits.
Nothing here modifies a folder.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import get_token

from sa_zoo.model_folder import read_json

REQUIRED = ("config.json", "metrics.json", "model.safetensors")
# Only these are published: anything else in a run folder (optimizer state, logs, pickles) stays on this machine.
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
# First bytes of a pickle (protocol 2 and later) and of a zip archive, which torch.save writes.
PICKLE_STARTS = (*(bytes([0x80, protocol]) for protocol in range(2, 6)), b"PK\x03\x04")


@dataclass(frozen=True)
class File:
    """One file of the manifest: its bytes or where they are, their number, their sha256, and the sha1 of git's blob."""

    source: Path | bytes
    size: int
    sha256: str
    git_sha1: str


Manifest = dict[str, File]


def read_manifest(folder: Path, card: str | None = None) -> Manifest:
    """Path in the repository -> File, sorted by path, for every published file; `card` takes the place of README.md."""
    paths = {path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()}
    sources: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in paths}
    if card is not None:
        sources["README.md"] = card.encode()
    return {name: _hashed(source) for name, source in sorted(sources.items())}


def not_published(folder: Path, manifest: Manifest) -> list[str]:
    """Top-level names of the folder that are not in the manifest."""
    published = {name.split("/")[0] for name in manifest}
    return sorted(path.name for path in folder.iterdir() if path.name not in published)


def check_complete(folder: Path) -> None:
    """Raise ValueError if the folder lacks what only training or conversion can give."""
    if not folder.is_dir():
        raise ValueError(f"got {folder}, which is not a folder, expected the folder of a finished run")
    if missing := [name for name in REQUIRED if not (folder / name).is_file()]:
        raise ValueError(
            f"got {folder} without {', '.join(missing)}, expected the folder of a finished run; "
            f"`sa-zoo evaluate {folder} --data NAME --json {folder}/metrics.json` measures a converted model"
        )


def check_folder(folder: Path, manifest: Manifest) -> torch.Tensor:
    """The logits of a complete folder, after every check that needs no network.

    Raises ValueError that names the file, what is wrong with it and what to do.
    """
    for name, file in manifest.items():
        _check_contents(name, file)
    if "num_classes" in read_json(folder / "config.json").get("model_args", {}):
        raise ValueError("got num_classes in config.json's model_args, expected it outside: transformers refuses it")
    return check_loads(f"local-dir:{folder}", folder, {})


def check_loads(timm_name: str, transformers_name: str | Path, where: dict) -> torch.Tensor:
    """Load by timm and by transformers, and return the logits (2, classes) on which they agree.

    timm_name: "local-dir:..." or "hf-hub:...@commit". where: keyword arguments that tell transformers the commit.
    Raises ValueError if the two differ by more than rounding.
    """
    from transformers import AutoModelForImageClassification  # takes seconds to import

    by_timm: Any = timm.create_model(timm_name, pretrained=True, cache_dir=where.get("cache_dir")).eval()
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


def _check_contents(name: str, file: File) -> None:
    content = _content(file.source)
    if content.startswith(PICKLE_STARTS):
        raise ValueError(f"got a pickle or an archive in {name}, expected none: weights are safetensors only")
    token = (get_token() or "").encode()
    found = SECRET.search(content) or (token and re.search(re.escape(token), content))
    if found:
        raise ValueError(f"got what looks like a token in {name}, byte {found.start()}: remove it and revoke it")


def _hashed(source: Path | bytes) -> File:
    content = _content(source)
    sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return File(source, len(content), hashlib.sha256(content).hexdigest(), sha1.hexdigest())


def _content(source: Path | bytes) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source
