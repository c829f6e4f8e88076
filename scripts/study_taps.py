"""python scripts/study_taps.py RUN HARDENED CONTROL

Measures on test images what becomes of a run whose heads become taps, and adds it to docs/taps.json; of seed 0, with a
figure. HARDENED is what `sa-zoo harden RUN --out HARDENED` left, and CONTROL the same without model.harden: at the same
rates, and for as much work.
"""

import argparse
import json
from pathlib import Path

import sa_zoo
from sa_zoo.analysis.figures import gaussian_layers, save_figure
from sa_zoo.analysis.head_figures import head_positions
from sa_zoo.folders.opened import open_folder
from sa_zoo.folders.write import write_json
from sa_zoo.models.attention import Attention
from sa_zoo.training.config import load_config
from sa_zoo.verbs.heads import TestImages

RESULTS = Path(__file__).parents[1] / "docs" / "taps.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("run", "hardened", "control"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--data", default="", help="where the data are, if not where they were")
    arguments = parser.parse_args()
    recipe = load_config(arguments.hardened / "train.toml")
    data = recipe.data
    if arguments.data:
        data = data.model_copy(update={"name": arguments.data})
    run = open_folder(arguments.run)
    test = TestImages(run.network, data)
    accuracy = {"run": test.accuracy(run.network)}
    sa_zoo.harden(run.network)
    accuracy["untrained"] = test.accuracy(run.network)
    more = {}
    for name in ("control", "hardened"):
        opened = open_folder(getattr(arguments, name))
        network = opened.network
        accuracy[name] = test.accuracy(network)
        trained = opened.metrics.train
        assert trained is not None
        more[name] = {"epochs": trained.epochs, "pflop": trained.pflop}
    attention = [module for module in network.modules() if isinstance(module, Attention)]
    row = {
        "model": arguments.run.name,
        "seed": load_config(arguments.run / "train.toml").train.seed,
        "data": test.name,
        "images": len(test.split),
        "lr": recipe.optim.lr,
        "accuracy": accuracy,
        "trained on": more,
        "taps": [layer.terms[0].taps() for layer in attention],
    }
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    write_json(RESULTS, [*found, row])
    if row["seed"] == 0:
        layers = gaussian_layers(network.state_dict())
        save_figure(head_positions(layers), RESULTS.with_name(f"taps-{row['model']}.png"))


if __name__ == "__main__":
    main()
