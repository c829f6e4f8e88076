"""Model cards: one template, rendered from what lies in a model folder and from nothing else.

The same folder always gives the same bytes. Every result comes from metrics.json; what that file does not hold, the
card does not claim.
"""

import hashlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sa_zoo.cost import cost_of

SCORES = ("n", "top1", "top5", "loss")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What a template, or a person in a hurry, leaves behind.
PLACEHOLDERS = re.compile(r"\[More Information Needed\]|\{\{|\}\}|\{%|\bTODO\b|\bTBD\b|\bFIXME\b", re.IGNORECASE)
PAPER = "arXiv:1911.03584"
BIBTEX = {
    PAPER: """@inproceedings{cordonnier2020relationship,
  title     = {On the Relationship between Self-Attention and Convolutional Layers},
  author    = {Cordonnier, Jean-Baptiste and Loukas, Andreas and Jaggi, Martin},
  booktitle = {International Conference on Learning Representations},
  year      = {2020},
  url       = {https://arxiv.org/abs/1911.03584}
}""",
    "arXiv:1512.03385": """@inproceedings{he2016deep,
  title     = {Deep Residual Learning for Image Recognition},
  author    = {He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  booktitle = {IEEE Conference on Computer Vision and Pattern Recognition},
  year      = {2016},
  url       = {https://arxiv.org/abs/1512.03385}
}""",
}


def architecture(folder: Path) -> str:
    """timm's name: config.json says it; a folder of the catalogue without a trained model is called by it."""
    name = _read_json(folder / "config.json").get("architecture", folder.resolve().name)
    if name not in timm.list_models():
        raise ValueError(f"got {name!r} as the model of {folder}, expected a name that timm lists")
    return name


def render_card(folder: Path) -> str:
    """README.md of a model folder. The repository is called you/NAME in it until `address_card` knows better.

    Raises ValueError where the folder lacks what the card is made of.
    """
    facts = _facts(folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["percent"] = lambda fraction: f"{100 * fraction:.2f} %"
    return environment.get_template("card.md.jinja").render(facts, metadata=_metadata(facts).to_yaml())


def write_card(folder: Path) -> Path:
    """Render README.md into the folder."""
    return _write(folder / "README.md", render_card(folder))


def address_card(folder: Path, repo_id: str) -> Path:
    """Put the repository's real name where the folder's card says you/NAME; write the card if there is none."""
    path = folder / "README.md"
    if not path.is_file():
        write_card(folder)
    return _write(path, path.read_text().replace(_unaddressed(folder), repo_id))


def check_card(folder: Path, repo_id: str) -> None:
    """Raises ValueError where README.md has a gap, or says anything else than the folder does."""
    text, facts = (folder / "README.md").read_text(), _facts(folder)
    again = "write it again with `sa-zoo card`"
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


def name_baseline(folder: Path, baseline: Path) -> Path:
    """Put the test result of another run into this one's metrics.json, for its card to print beside its own.

    Raises ValueError where the two were not measured on the same images.
    """
    mine, other = (_read_json(path / "metrics.json") for path in (folder, baseline))
    measured = [(run.get("data"), run.get("data_revision"), run.get("test", {}).get("n")) for run in (mine, other)]
    if measured[0] != measured[1] or measured[0][2] is None:
        raise ValueError(f"got a baseline measured on {measured[1]}, expected {measured[0]} (data, revision, images)")
    mine["baseline"] = {
        "model": architecture(baseline),
        "fine_tuned": bool(_init(baseline)),
        "epochs": other.get("train", {}).get("epochs"),
        "test": {key: other["test"][key] for key in SCORES},
    }
    return _write(folder / "metrics.json", json.dumps(mine, indent=2) + "\n")


def _facts(folder: Path) -> dict[str, Any]:
    """Everything the template may say, by the template's names."""
    metrics, recipe, init = _read_json(folder / "metrics.json"), _text(folder / "train.toml"), _init(folder)
    name = architecture(folder)
    entry = timm.models.model_entrypoint(name)
    model = timm.create_model(f"local-dir:{folder}" if (folder / "config.json").is_file() else name)
    described = model.pretrained_cfg
    return {
        "name": name,
        "repo_id": _unaddressed(folder),
        "summary": " ".join((entry.__doc__ or "").split("\n\n")[0].split()) or f"{name} of timm.",
        "attention": described.get("paper_ids") == PAPER,
        "ours": entry.__module__.startswith("sa_zoo."),
        "remote_code": "auto_map" in _read_json(folder / "config.json"),
        "weights_sha256": _weights_sha256(folder),
        "data": metrics.get("data"),
        "revision": metrics.get("data_revision") or None,
        "results": list(_results(name, metrics)),
        "validation": "validation" in metrics,
        "baseline": "baseline" in metrics,
        "input_size": tuple(described["input_size"]),
        "cost": cost_of(model, tuple(described["input_size"])),
        "label_names": described.get("label_names") or [],
        "recipe": recipe.strip(),
        "weights_from": described.get("hf_hub_id"),
        "base": init.partition(":")[2] or init,
        "base_model": metrics.get("base_model") or _hub_id(init),
        "conversion": metrics.get("conversion"),
        "train": {f"train.{key}": round(value, 1) for key, value in metrics.get("train", {}).items()},
        "environment": {key: value for key, value in metrics.get("environment", {}).items() if value not in ("", None)},
        "figures": sorted(path.name for path in (folder / "figures").glob("*.png")),
        "licence": described.get("license") or "apache-2.0",
        "bibtex": BIBTEX.get(described.get("paper_ids")),
    }


def _metadata(facts: Mapping[str, Any]) -> ModelCardData:
    """The YAML at the top; the Hub's own classes decide what it looks like."""
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


def _results(name: str, metrics: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the results table: model, split and its scores."""
    measured = [(name, split, metrics[split]) for split in ("test", "validation") if split in metrics]
    if baseline := metrics.get("baseline"):
        trained = "fine-tuned" if baseline.get("fine_tuned") else "trained"
        epochs = f", {trained} for {baseline['epochs']} epochs" if baseline.get("epochs") else ""
        measured.append((baseline["model"] + epochs, "test", baseline["test"]))
    for model, split, scores in measured:
        yield {"model": model, "split": split, **{key: scores[key] for key in SCORES}}


def _init(folder: Path) -> str:
    """What a run started from; empty: random weights."""
    return tomllib.loads(_text(folder / "train.toml")).get("model", {}).get("init", "")


def _hub_id(init: str) -> str | None:
    """The Hub repository that a model started from, where there is one."""
    if init.startswith("hf-hub:"):
        return init.removeprefix("hf-hub:").partition("@")[0]
    config = timm.models.get_pretrained_cfg(init) if timm.is_model(init) else None
    return config.hf_hub_id if config else None


def _slug(name: str) -> str:
    return name if HUB_ID.fullmatch(name) else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _unaddressed(folder: Path) -> str:
    return f"you/{architecture(folder)}"


def _weights_sha256(folder: Path) -> str | None:
    """Of model.safetensors; the catalogue keeps its sum without it."""
    weights = folder / "model.safetensors"
    if weights.is_file():
        return hashlib.sha256(weights.read_bytes()).hexdigest()
    return _text(folder / "SHA256SUMS").partition(" ")[0] or None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(_text(path) or "{}")


def _write(path: Path, text: str) -> Path:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    return Path(file.name).replace(path)
