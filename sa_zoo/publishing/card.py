"""Model cards, rendered from a model folder and nothing else.

The same folder always gives the same bytes. Every result comes from metrics.json.
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sa_zoo.cost import cost_of
from sa_zoo.folders.metrics import Metrics, margin, read_results
from sa_zoo.folders.parts import parts_of
from sa_zoo.opened import Opened
from sa_zoo.publishing.folder import HUB_ID, IMAGES, MODEL, without_paths

MARKUP = re.compile(r"[\\`*\[\]<>|]|:(?=//)|(?<=www)\.", re.IGNORECASE)
PAPER = "arXiv:1911.03584"


def write_card(opened: Opened) -> Path:
    opened.with_files({"README.md": render_card(opened).encode()})
    return opened.local_folder / "README.md"


def render_card(opened: Opened, repo_id: str = "") -> str:
    """README.md of a model folder, for the repository `repo_id`; default: you/NAME."""
    return _render(_facts(opened), repo_id)


def published_card(opened: Opened, repo_id: str) -> str:
    """README.md for publication as `repo_id`, with all manual edits. The folder is not changed.

    Raises ValueError if edits leave metadata, weights or a recipe other than the folder's.
    """
    facts = _facts(opened)
    text = _text(opened.local_folder / "README.md")
    title = re.search(r"^# ([\w.-]+)$", text, re.MULTILINE)
    if title:  # the folder may have been renamed since
        facts["title"] = title[1]
    if text in ("", _render(facts)):
        return _render(facts, repo_id)
    text = text.replace(f"you/{facts['title']}", repo_id)
    card = ModelCard(text).data.to_dict()
    other = [key for key, value in _metadata(facts).to_dict().items() if card.get(key) != value]
    other += [key for key in ("weights_sha256", "recipe") if facts[key] not in text]
    if other:
        raise ValueError(
            f"README.md: got another {', '.join(other)}, expected that of the folder: "
            "render it again with `sa-zoo card`"
        )
    return text


def _render(facts: dict[str, Any], repo_id: str = "") -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["text"] = _text_in_markdown
    template = environment.from_string(_text(Path(__file__).with_name("card.md.jinja")))
    repo_id = repo_id or f"you/{facts['title']}"
    metadata = _metadata(facts).to_yaml()
    return template.render(facts, repo_id=repo_id, metadata=metadata)


def _facts(opened: Opened) -> dict[str, Any]:
    """All variables of the template except for the repository."""
    folder = opened.local_folder
    name = opened.config["architecture"]
    entry = timm.models.model_entrypoint(name)
    cfg: Any = opened.network.pretrained_cfg
    ours = entry.__module__.startswith("sa_zoo.")
    summary = entry.__doc__ or f"{name} of timm."
    cnn = ""
    if name.startswith("mhsa_"):
        cnn = opened.config.get("model_args", {}).get("cnn") or name.removeprefix("mhsa_")
        summary = f"{cnn} of timm with its convolutions as multi-head self-attention."
    base_model = opened.metrics.base_model
    recipe = without_paths(_text(folder / "train.toml"), opened.metrics.data)
    settings = tomllib.loads(recipe)
    init = settings.get("model", {}).get("init", "")
    # weights of others may allow less
    license_ = "apache-2.0" if ours and not (cnn or base_model) else "unknown"
    return {
        "title": re.sub(r"[^\w.-]+", "-", folder.resolve().name),
        "summary": " ".join(summary.split("\n\n")[0].split()).rstrip(".") + ".",
        "cnn": cnn,
        "ours": ours,
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "metrics": opened.metrics,
        "seeds": [run.test.top1 for run in read_results(folder).get("", []) if run.test],
        "cfg": cfg,
        "config": opened.config,
        "license": cfg.get("license") or license_,
        "cost": cost_of(opened.network, tuple(cfg["input_size"])),
        "files": parts_of(folder),
        "recipe": recipe.strip(),
        "settings": settings,
        "init": init,
        "placeholders": {"data.name": IMAGES, "model.init": MODEL},
        "margin": margin,
        "base_model": base_model,
    }


def _metadata(facts: dict[str, Any]) -> ModelCardData:
    """The YAML at the top, as a class of the Hub client."""
    metrics: Metrics = facts["metrics"]
    data = metrics.data or ""
    on_hub = HUB_ID.fullmatch(data)
    tags = ["timm", "transformers", "image-classification"]
    # the Hub's widget and transformers' pipelines give color images to every network
    task = "image-classification" if facts["cfg"]["input_size"][0] == 3 else None
    if facts["cfg"].get("paper_ids") == PAPER:
        tags.append("self-attention")
    scores = {}
    if metrics.test:
        scores = {"top-1": metrics.test.top1, "top-5": metrics.test.top5}
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=data if on_hub else re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-"),
            dataset_name=data,
            dataset_split="test",
            dataset_revision=metrics.data_revision or None,
            metric_type="accuracy",
            metric_name=f"{score} accuracy",
            metric_value=value,
        )
        for score, value in scores.items()
        if value is not None
    ]
    return ModelCardData(
        license=facts["license"],
        library_name="timm",
        pipeline_tag=task,
        tags=tags,
        base_model=facts["base_model"] or None,
        datasets=[data] if on_hub else None,
        metrics=["accuracy"] if results else None,
        model_name=facts["title"] if results else None,
        eval_results=results or None,
    )


def _text_in_markdown(value: object) -> str:
    """Text from others, such as names of classes, on one line and without Markdown, HTML or links."""
    return MARKUP.sub(r"\\\g<0>", " ".join(str(value).split()))


def _text(path: Path) -> str:
    """The contents of a file; empty if there is none."""
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8")
