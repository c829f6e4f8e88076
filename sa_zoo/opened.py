"""An opened model: checked and built once, then passed to all steps of a command."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import snapshot_download
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import parse_model_name
from torch import Tensor, nn

from sa_zoo.data.image_file import open_image
from sa_zoo.data.input_format import input_format_of
from sa_zoo.folders.check import TIMM_FILES, check_name, checked, refusing
from sa_zoo.folders.metrics import FILE, Metrics, read_metrics
from sa_zoo.folders.write import check_inside, check_sums, read_json, write_file

Picture = str | Path | Image.Image  # a file or its image
# Names of classes and their probabilities, the most probable first
Prediction = list[tuple[str, float]]


@dataclass(frozen=True)
class Opened:
    """A trained model with its config.json and metrics.json."""

    source: str  # what timm loads: "local-dir:FOLDER", "hf-hub:OWNER/NAME@REVISION" or a timm name
    folder: Path | None  # of the model; None unless it is on this machine
    network: nn.Module  # on the CPU, in evaluation mode
    config: dict[str, Any]  # config.json; empty for a timm name
    metrics: Metrics  # metrics.json; empty without one

    @property
    def local_folder(self) -> Path:
        """`folder`. Raises ValueError without a folder on this machine."""
        if self.folder is None:
            raise ValueError(f"model: got {self.source}, expected a folder on this machine")
        return self.folder

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file in the folder; none without one. Raises ValueError if the file is damaged."""
        if self.folder is None or not (self.folder / name).is_file():
            return {}
        with refusing(str(self.folder / name)):
            return load_file(self.folder / name)

    def with_files(self, files: Mapping[str, bytes]) -> "Opened":
        """The same model after writing these files, by name, into its folder."""
        folder = self.local_folder
        for name, content in files.items():
            check_inside(folder, name)
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, content)
        return replace(self, config=read_json(folder / "config.json"))

    def predict(self, pictures: Picture | Iterable[Picture], top: int = 5) -> list[Prediction]:
        """The `top` most probable classes of each picture.

            sa_zoo.open("runs/mine").predict(["cat.jpg", PIL.Image.open("dog.jpg")])[0]  # [("cat", 0.93), ...]

        Raises the errors of `classifier`.
        """
        if isinstance(pictures, Picture):
            pictures = [pictures]
        return [*map(self.classifier(top), pictures)]

    def classifier(self, top: int = 5) -> Callable[[Picture], Prediction]:
        """A function of a picture of any size, which is preprocessed as in evaluation.

        Probabilities of a multi-label model are those of each class by itself. Raises ValueError for a model that does
        not classify; the function does for a file without a usable image.
        """
        network: Any = self.network
        several = self.config.get("problem_type") == "multi_label_classification"
        probabilities = torch.sigmoid if several else partial(torch.softmax, dim=0)
        if self.config.get("problem_type") == "regression" or network.num_classes < 2 - several:
            raise ValueError(f"model: got {self.source} without classes, expected a classifier")
        names = class_names(network)
        input_format = input_format_of(network)
        like = next(network.parameters())

        def classify(picture: Picture) -> Prediction:
            if not isinstance(picture, Picture):
                raise TypeError(f"got {type(picture).__name__}, expected a file or a PIL image")
            try:
                image = open_image(Path(picture) if isinstance(picture, str) else picture)
                pixels = input_format.resized(image).to(like.device)
            except ValueError as error:
                raise ValueError(f"{picture}: {error}") from error
            with torch.inference_mode():
                logits = network(input_format.normalize(pixels[None]).to(like.dtype))[0].float()
            found, classes = probabilities(logits).topk(min(top, len(names)))
            return [(names[k], p) for k, p in zip(classes.tolist(), found.tolist(), strict=True)]

        return classify

    def moved(self, folder: Path) -> "Opened":
        """The same model after a move to another folder."""
        return replace(self, source=f"local-dir:{folder}", folder=folder)


def open_model(source: "str | Path | Opened") -> Opened:
    """Open a model: its network with its weights, on the CPU, its config and its metrics.

        run = sa_zoo.open("runs/mine")  # or "hf-hub:you/NAME", or a timm name with weights
        print(run.metrics.test.top1, run.config["architecture"])
        logits = run.network(images)

    A Path is a folder; an Opened is returned unchanged. The folder is untrusted and checked first. Raises
    FileNotFoundError if there is no such folder or repository, ValueError if it is damaged, names something foreign or
    holds no weights, or those of another model.
    """
    if isinstance(source, Opened):
        return source
    folder = folder_of(source)
    name = str(source)
    if folder:
        folder = folder.absolute()  # the caller may change to another folder
        check_sums(folder, TIMM_FILES)
        name = f"local-dir:{folder}"
    elif ":" not in name:
        check_name(name, "a model folder or a timm name")
    with checked(name) as exact, torch.random.fork_rng([]):
        network = build_model(exact, pretrained=True, model_name=exact).eval()
    if not folder:
        return Opened(exact, None, network, *_from_hub(exact))
    return Opened(exact, folder, network, read_json(folder / "config.json"), read_metrics(folder))


def class_names(network: Any) -> list[str]:
    """The classes of a model in words; without names those of ImageNet, if it has as many, or numbers."""
    names: Any = network.pretrained_cfg.get("label_names") or ()
    words: Any = network.pretrained_cfg.get("label_descriptions") or {}
    subset = infer_imagenet_subset(network)
    if len(names) != network.num_classes:
        names = ImageNetInfo(subset).label_descriptions() if subset else range(network.num_classes)
    return [str(words.get(name, name)) for name in names]


def _from_hub(source: str) -> tuple[dict[str, Any], Metrics]:
    """Config and metrics of the opened revision; empty for names of timm, and metrics that are none of this package."""
    kind, name = parse_model_name(source)
    metrics = Metrics()
    if kind != "hf-hub":
        return {}, metrics
    repo_id, _, revision = name.partition("@")
    files = ["config.json", FILE]
    folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=files))
    with suppress(ValueError):
        metrics = read_metrics(folder)
    return read_json(folder / "config.json"), metrics


def folder_of(source: str | Path | Opened) -> Path | None:
    """The folder of a source; None for other sources. Raises FileNotFoundError if the folder is missing."""
    if isinstance(source, Opened):
        return source.folder
    if not isinstance(source, str | Path):
        raise TypeError(f"model: got {type(source).__name__}, expected a folder or a name")
    name = str(source).removeprefix("local-dir:")
    folder = Path(name)
    if folder.is_dir():
        return folder
    if name == source and (":" in name or folder.name == name):
        return None
    raise FileNotFoundError(f"model: got {folder}, which is not there; expected a model folder")


def base_model_of(source: str, network: Any) -> str:
    """The Hub repository of a network's weights, or of those that they were made of; empty if unknown."""
    folder = folder_of(source)
    if folder:
        return read_metrics(folder).base_model or ""
    return (network.pretrained_cfg.get("hf_hub_id") or "").partition("@")[0]


def build_model(source: str, pretrained: bool, **arguments: Any) -> nn.Module:
    """`timm.create_model`.

    Raises ValueError if `source` has no weights, if the weights or the arguments do not fit, or the weights have NaN or
    infinity.
    """
    try:
        network = timm.create_model(**arguments, pretrained=pretrained)
    except ValueError:
        raise
    except Exception as error:  # models raise anything for bad arguments
        of_weights = isinstance(error, (OSError, RuntimeError, SafetensorError))
        message = " ".join(str(error).split())
        raise ValueError(
            f"{'weights' if of_weights else 'model.args'}: got {source}, which cannot be built: "
            f"{type(error).__name__}: {message}"
        ) from error
    for name, tensor in network.state_dict().items():
        if pretrained and not tensor.isfinite().all():
            raise ValueError(f"weights: got NaN or infinity in {name} of {source}")
    return network
