"""Model cards: one template, rendered from the files of a model folder and nothing else.

The same folder always gives the same bytes. Every result comes from metrics.json: what is not in that file, the card
does not claim.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sa_zoo.cost import cost_of
from sa_zoo.metrics import Baseline, Metrics, Scores, read_metrics, write_metrics
from sa_zoo.model_folder import read_json, write_file

SCORES = ("n", "top1", "top5", "loss")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Left by a template or by hand.
PLACEHOLDERS = re.compile(r"\[More Information Needed\]|\{\{|\}\}|\{%|\bTODO\b|\bTBD\b|\bFIXME\b", re.IGNORECASE)
PAPER = "arXiv:1911.03584"


def architecture(folder: Path) -> str:
    """timm's name: the one in config.json, or the folder's own for a model of the catalogue without weights."""
    name = _config(folder).get("architecture", folder.resolve().name)
    if name not in timm.list_models():
        raise ValueError(f"got {name!r} as the model of {folder}, expected a name that timm lists")
    return name


def render_card(folder: Path, repo_id: str = "") -> str:
    """README.md of a model folder, for the repository `repo_id`; you/NAME if it is not known yet.

    Raises ValueError if the folder lacks what the card is made of.
    """
    return _render(_facts(folder), repo_id)


def write_card(folder: Path) -> Path:
    """Render README.md into the folder."""
    return write_file(folder / "README.md", render_card(folder))


def published_card(folder: Path, repo_id: str) -> str:
    """README.md as it is published as `repo_id`. The folder stays as it is.

    A README.md that somebody edited is published with the edits, if it still states what the folder does.
    Raises ValueError for one that has a gap or states something else.
    """
    facts, path = _facts(folder), folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else _render(facts)
    edited = text != _render(facts)
    text = text.replace(_generic_id(facts), repo_id) if edited else _render(facts, repo_id)
    again = "render it again with `sa-zoo card`"
    if gap := PLACEHOLDERS.search(text):
        raise ValueError(f"got {gap[0]!r} in README.md, expected a finished card: {again}")
    card, expected = ModelCard(text).data.to_dict(), _metadata(facts).to_dict()
    for key, value in expected.items():
        if card.get(key) != value:
            raise ValueError(f"got {card.get(key)!r} as {key} of README.md, expected {value!r}: {again}")
    if facts["weights_sha256"] not in text:
        raise ValueError(f"got a README.md without the sha256 of model.safetensors as it is now: {again}")
    if repo_id not in text:
        raise ValueError(f"got a README.md that does not name {repo_id}, expected usage code that loads it: {again}")
    return text


def name_baseline(folder: Path, baseline: Path) -> Path:
    """Put the test result of another run into this one's metrics.json, for its card to print next to its own.

    Raises ValueError if the two were not measured on the same images.
    """
    mine, other = read_metrics(folder), read_metrics(baseline)
    measured = [(run.data, run.data_revision, run.test.n if run.test else None) for run in (mine, other)]
    if measured[0] != measured[1] or other.test is None:
        raise ValueError(f"got a baseline measured on {measured[1]}, expected {measured[0]} (data, revision, images)")
    named = Baseline(
        model=architecture(baseline),
        fine_tuned=bool(_init(_recipe(baseline))),
        epochs=other.train.epochs if other.train else None,
        test=Scores(**other.test.model_dump(include=set(SCORES))),
    )
    return write_metrics(folder, mine.model_copy(update={"baseline": named}))


def _render(facts: Mapping[str, Any], repo_id: str = "") -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["percent"] = lambda fraction: f"{100 * fraction:.2f} %"
    template = environment.get_template("card.md.jinja")
    return template.render(facts, repo_id=repo_id or _generic_id(facts), metadata=_metadata(facts).to_yaml())


def _facts(folder: Path) -> dict[str, Any]:
    """Everything that the template may print, by the template's names; all but the repository."""
    metrics, recipe = read_metrics(folder), _recipe(folder)
    init = _init(recipe)
    name = architecture(folder)
    entry = timm.models.model_entrypoint(name)
    model: Any = timm.create_model(f"local-dir:{folder}" if (folder / "config.json").is_file() else name)
    described = model.pretrained_cfg
    return {
        "name": name,
        "summary": " ".join((entry.__doc__ or "").split("\n\n")[0].split()) or f"{name} of timm.",
        "attention": described.get("paper_ids") == PAPER,
        "ours": entry.__module__.startswith("sa_zoo."),
        "remote_code": "auto_map" in _config(folder),
        "weights_sha256": _weights_sha256(folder),
        "data": metrics.data,
        "revision": metrics.data_revision or None,
        "results": list(_results(name, metrics)),
        "validation": metrics.validation is not None,
        "baseline": metrics.baseline is not None,
        "input_size": tuple(described["input_size"]),
        "cost": cost_of(model, tuple(described["input_size"])),
        "label_names": described.get("label_names") or [],
        "recipe": recipe.strip(),
        "weights_from": described.get("hf_hub_id"),
        "base": init.partition(":")[2] or init,
        "base_model": metrics.base_model or _hub_id(init),
        "conversion": metrics.conversion,
        "train": {f"train.{key}": round(value, 1) for key, value in metrics.measured().get("train", {}).items()},
        "environment": {key: value for key, value in (metrics.environment or {}).items() if value != ""},
        "figures": sorted(path.name for path in (folder / "figures").glob("*.png")),
        "licence": described.get("license") or "apache-2.0",
        "paper": described.get("paper_ids"),
    }


def _metadata(facts: Mapping[str, Any]) -> ModelCardData:
    """The YAML at the top, as the Hub's own classes write it."""
    data, tested = facts["data"], [row for row in facts["results"] if row["split"] == "test"][:1]
    evaluations = [
        EvalResult(
            task_type="image-classification",
            dataset_type=_slug(data),
            dataset_name=data,
            dataset_split="test",
            dataset_revision=facts["revision"],
            metric_type="accuracy",
            metric_name=f"{metric} accuracy",
            metric_value=float(row[key]),
        )
        for row in tested
        for metric, key in (("top-1", "top1"), ("top-5", "top5"))
    ]
    return ModelCardData(
        license=facts["licence"],
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["timm", "transformers", "image-classification", *(["self-attention"] if facts["attention"] else [])],
        base_model=facts["base_model"] or None,
        datasets=[data] if data and HUB_ID.fullmatch(data) else None,
        metrics=["accuracy"] if evaluations else None,
        model_name=facts["name"] if evaluations else None,
        eval_results=evaluations or None,
    )


def _results(name: str, metrics: Metrics) -> Iterator[dict[str, Any]]:
    """Rows of the results table: model, split and its scores."""
    measured = [(name, "test", metrics.test), (name, "validation", metrics.validation)]
    if baseline := metrics.baseline:
        trained = "fine-tuned" if baseline.fine_tuned else "trained"
        epochs = f", {trained} for {baseline.epochs} epochs" if baseline.epochs else ""
        measured.append((baseline.model + epochs, "test", baseline.test))
    for model, split, scores in measured:
        if scores:
            yield {"model": model, "split": split, **scores.model_dump(include=set(SCORES))}


def _init(recipe: str) -> str:
    """The weights that a run started from; empty: random ones."""
    return tomllib.loads(recipe).get("model", {}).get("init", "")


def _hub_id(init: str) -> str | None:
    """The Hub repository that a model started from, if there is one."""
    if init.startswith("hf-hub:"):
        return init.removeprefix("hf-hub:").partition("@")[0]
    config = timm.models.get_pretrained_cfg(init) if timm.is_model(init) else None
    return config.hf_hub_id if config else None


def _slug(name: str) -> str:
    return name if HUB_ID.fullmatch(name) else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _generic_id(facts: Mapping[str, Any]) -> str:
    return f"you/{facts['name']}"


def _weights_sha256(folder: Path) -> str | None:
    """Of model.safetensors; the catalogue keeps its sum without it."""
    weights, sums = folder / "model.safetensors", folder / "SHA256SUMS"
    if weights.is_file():
        return hashlib.sha256(weights.read_bytes()).hexdigest()
    return sums.read_text(encoding="utf-8").partition(" ")[0] if sums.is_file() else None


def _recipe(folder: Path) -> str:
    path = folder / "train.toml"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}
