"""Model cards, rendered from the files of a model folder and nothing else, and the catalogue of all cards.

The same folder always gives the same bytes. Every result comes from metrics.json. The catalogue, model_cards/, has one
folder per registered model, with its card and the files that the card is rendered from.
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import timm
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from sa_zoo.folders.cost import cost_of
from sa_zoo.folders.metrics import Baseline, Scores, read_metrics, read_results, write_metrics
from sa_zoo.folders.write import read_json, write_file

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PLACEHOLDERS = re.compile(
    r"\[More Information Needed\]|\{\{|\}\}|\{%|\bTODO\b|\bTBD\b|\bFIXME\b", re.IGNORECASE
)
PAPER = "arXiv:1911.03584"


def architecture(folder: Path) -> str:
    """timm's name: the one in config.json, or the folder's own for a model of the catalogue without weights."""
    name = _config(folder).get("architecture", folder.resolve().name)
    if name not in timm.list_models():
        raise ValueError(f"got {name!r} as the model of {folder}, expected a name that timm lists")
    return name


def render_card(folder: Path, repo_id: str = "") -> str:
    """README.md of a model folder, for the repository `repo_id`; you/NAME if it is not known yet."""
    return _render(_facts(folder), repo_id)


def write_card(folder: Path) -> Path:
    return write_file(folder / "README.md", render_card(folder))


def published_card(folder: Path, repo_id: str) -> str:
    """README.md as it is published as `repo_id`, with the edits that somebody made to it. The folder stays as it is.

    Raises ValueError for edits that leave a placeholder, or other metadata, weights or usage code than the folder's.
    """
    facts = _facts(folder)
    written, again = _text(folder / "README.md"), "render it again with `sa-zoo card`"
    edited = written not in ("", _render(facts))
    text = written.replace(f"you/{facts['title']}", repo_id) if edited else _render(facts, repo_id)
    if edited and (gap := PLACEHOLDERS.search(text)):  # rendered, it may have a class named "TODO"
        raise ValueError(f"got {gap[0]!r} in README.md, expected a finished card: {again}")
    card = ModelCard(text).data.to_dict()
    for key, value in _metadata(facts).to_dict().items():
        if card.get(key) != value:
            raise ValueError(
                f"got {card.get(key)!r} as {key} of README.md, expected {value!r}: {again}"
            )
    for part, of in (
        (facts["weights_sha256"], "the current sha256 of model.safetensors"),
        (repo_id, "usage code"),
    ):
        if part not in text:
            raise ValueError(f"got a README.md without {part}, expected {of}: {again}")
    return text


def registered_models() -> list[str]:
    """timm names of the models of this package."""
    names = timm.list_models()
    return [
        name
        for name in names
        if timm.models.model_entrypoint(name).__module__.startswith("sa_zoo.")
    ]


def write_catalogue(model_cards: Path) -> None:
    """Render the card of every folder and registered model; that of one without a trained run says so."""
    for name in {
        *registered_models(),
        *(path.name for path in model_cards.iterdir() if path.is_dir()),
    }:
        (model_cards / name).mkdir(parents=True, exist_ok=True)
        write_card(model_cards / name)


def name_baseline(folder: Path, baseline: Path) -> Path:
    """Put another run's test result into metrics.json. Raises ValueError if it was measured on other images."""
    mine, other = read_metrics(folder), read_metrics(baseline)
    measured = [
        (run.data, run.data_revision or None, run.test.n if run.test else None)
        for run in (mine, other)
    ]
    if measured[0] != measured[1] or other.test is None:
        raise ValueError(
            f"got a baseline measured on {measured[1]}, expected {measured[0]} (data, revision, images)"
        )
    named = Baseline(
        model=architecture(baseline),
        fine_tuned=bool(_init(_text(baseline / "train.toml"))),
        epochs=other.train.epochs if other.train else None,
        test=Scores(**other.test.model_dump(include={"n", "top1", "top5", "loss"})),
    )
    return write_metrics(folder, mine.model_copy(update={"baseline": named}))


def _render(facts: dict[str, Any], repo_id: str = "") -> str:
    text = _text(Path(__file__).with_name("card.md.jinja"))
    template = jinja2.Template(
        text,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return template.render(
        facts, repo_id=repo_id or f"you/{facts['title']}", metadata=_metadata(facts).to_yaml()
    )


def _facts(folder: Path) -> dict[str, Any]:
    """Everything that the template may print except for the repository, by the template's names."""
    name, metrics, recipe = architecture(folder), read_metrics(folder), _text(folder / "train.toml")
    init, config, weights = _init(recipe), _config(folder), folder / "model.safetensors"
    entry = timm.models.model_entrypoint(name)
    model: Any = timm.create_model(f"local-dir:{folder}" if config else name)
    cfg: dict[str, Any] = model.pretrained_cfg
    ours = entry.__module__.startswith("sa_zoo.")
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else ""
    own_name = folder.resolve().name
    return {
        "name": name,
        "title": own_name if own_name.startswith(f"{name}.") else name,  # NAME.TAG of the catalogue
        "summary": " ".join((entry.__doc__ or f"{name} of timm.").split("\n\n")[0].split()),
        "attention": cfg.get("paper_ids") == PAPER,
        "ours": ours,
        "remote_code": "auto_map" in config,
        "weights_sha256": sha256,
        "metrics": metrics,
        "seeds": [run.test.top1 for run in read_results(folder).get("", []) if run.test],
        "cfg": cfg,
        "license": cfg.get("license") or ("apache-2.0" if ours else "unknown"),
        "cost": cost_of(model, tuple(cfg["input_size"])),
        "recipe": recipe.strip(),
        "title_of_data": tomllib.loads(recipe)
        .get("data", {})
        .get("title", ""),  # if given, the name is a folder
        "base": init.partition(":")[2] or init,
        "base_model": metrics.base_model or _hub_id(init),
        "figures": [path.name for path in (folder / "figures").glob("*.png")],
        "explorer": (folder / "explorer.html").is_file(),
        "report": (folder / "report.md").is_file(),
    }


def _metadata(facts: dict[str, Any]) -> ModelCardData:
    """The YAML at the top, as the Hub's own classes write it."""
    metrics = facts["metrics"]
    data, test = metrics.data or "", metrics.test
    on_hub = HUB_ID.fullmatch(data)
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=data if on_hub else re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-"),
            dataset_name=data,
            dataset_split="test",
            dataset_revision=metrics.data_revision or None,
            metric_type="accuracy",
            metric_name=f"{name} accuracy",
            metric_value=value,
        )
        for name, value in ((("top-1", test.top1), ("top-5", test.top5)) if test else ())
    ]
    return ModelCardData(
        license=facts["license"],
        library_name="timm",
        pipeline_tag="image-classification",
        tags=[
            "timm",
            "transformers",
            "image-classification",
            *(["self-attention"] if facts["attention"] else []),
        ],
        base_model=facts["base_model"] or None,
        datasets=[data] if on_hub else None,
        **(
            {"metrics": ["accuracy"], "model_name": facts["title"], "eval_results": results}
            if test
            else {}
        ),
    )


def _init(recipe: str) -> str:
    """The weights that a run started from; empty if they were random."""
    return tomllib.loads(recipe).get("model", {}).get("init", "")


def _hub_id(init: str) -> str | None:
    """The Hub repository that a model started from, if there is one."""
    if init.startswith("hf-hub:"):
        return init.removeprefix("hf-hub:").partition("@")[0]
    config = timm.models.get_pretrained_cfg(init) if timm.is_model(init) else None
    return config.hf_hub_id if config else None


def _text(path: Path) -> str:
    """The contents of a file; empty if there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}
