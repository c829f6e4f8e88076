"""The manifest of a model folder to publish, and its offline checks. The folder is only read."""

import re
import tomllib
from pathlib import Path

import timm
import tomli_w
import torch
from huggingface_hub import get_token
from safetensors import deserialize
from torch import nn

from sa_zoo.folders.parts import parts_of
from sa_zoo.folders.write import check_sums

# Hugging Face, GitHub, OpenAI-like, Slack and AWS keys, and private keys in PEM or of PGP.
SECRET = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}"
    rb"|github_pat_\w{30,}|sk-[A-Za-z0-9_-]{32,}|(?:xox[a-z]|xapp)-[A-Za-z0-9-]{20,}|A[KS]IA[A-Z0-9]{16})\b"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY"
)

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # of a model or data set
# In a published train.toml
IMAGES = "path/to/images"
MODEL = "path/to/model"


def read_manifest(folder: Path) -> dict[str, bytes]:
    """The files of a folder to publish, without code. Raises ValueError for a damaged file or a link out of it."""
    check_sums(folder)
    names = [name for name in parts_of(folder) if not name.endswith(".py")]
    return {name: (folder / name).read_bytes() for name in names}


def without_paths(recipe: str, data: str | None) -> str:
    """A train.toml with IMAGES and MODEL in place of folders on this machine.

    `data` is the name of the data in metrics.json: a Hub name, a title, or the last part of a folder's path. A titled
    name with a revision is on the Hub; without a revision, OWNER/NAME may also be a folder.
    """
    settings = tomllib.loads(recipe)
    images = settings.get("data", {})
    on_hub = images.get("revision") and HUB_ID.fullmatch(images.get("name", ""))
    if images.get("name", data) != data and not on_hub:
        images["name"] = IMAGES
    init = settings.get("model", {}).get("init", "")
    public = init in ("", "pretrained") or init.startswith("hf-hub:") or timm.is_model(init)
    if not public:
        settings["model"]["init"] = MODEL
    return tomli_w.dumps(settings)


def check_content(name: str, content: bytes) -> None:
    """Raise ValueError for a token, SafetensorError for tensors in another format, such as a pickle."""
    if name.endswith(".safetensors"):
        deserialize(content)
    token = get_token()
    if SECRET.search(content) or (token and token.encode() in content):
        raise ValueError(f"got what looks like a token in {name}: remove it and revoke it")


def check_loads(network: nn.Module, folder: Path) -> torch.Tensor:
    """Logits (2, classes) of a network. Raises ValueError if those of the model loaded by transformers differ."""
    from transformers import AutoModelForImageClassification  # takes seconds to import

    by_transformers = AutoModelForImageClassification.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True
    ).eval()
    input_size = network.pretrained_cfg["input_size"]  # type: ignore[index]
    images = torch.randn(2, *input_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = network(images)
        others = by_transformers(pixel_values=images).logits
    if logits.shape != others.shape or not torch.allclose(logits, others, rtol=1e-5, atol=1e-5):
        raise ValueError(
            f"got logits {logits[0]} from the network, but {others[0]} from transformers for {folder}; "
            "if the network was changed after it was opened, save it with timm.models.save_for_hf, and finish the new "
            "folder"
        )
    return logits
