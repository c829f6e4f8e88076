"""Model folders and image files as somebody hostile would write them: one function or value per attack."""

import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def change_config(**changes: Any) -> Callable[[Path], None]:
    """Replace keys of config.json; "a.b" is a key of a table. A value of None removes the key."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for path, value in changes.items():
            *tables, key = path.split("__")
            table = config
            for name in tables:
                table = table.setdefault(name, {})
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def config_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_bytes(text.encode("latin-1")) and None


def weights(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(content(path.read_bytes()))

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        values = load_file(folder / "model.safetensors")
        change(values)
        (folder / "model.safetensors").write_bytes(save(values, {"format": "pt"}))

    return write


TABLE = b'{"a": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 64]}}'
OVERFLOWING = struct.pack("<Q", len(TABLE)) + TABLE + bytes(64)


def pickled(folder: Path) -> None:
    """The weights as a pickle that runs code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(folder / "executed")))


def many_empty_tensors(folder: Path) -> None:
    """A header that promises more than the file holds, for a network of 72 million parameters."""
    change_config(model_args__embed_dim=3000)(folder)
    empty = {f"empty.{number}": np.zeros(0, np.float32) for number in range(20_000)}
    tensors(lambda values: values.update(empty))(folder)


def poison(values: dict[str, np.ndarray]) -> None:
    values["head.bias"] = values["head.bias"].astype(np.float64)  # however they are stored
    values["head.bias"][0] = -np.inf


BIAS = "blocks.0.fc1.bias"
WRONG_SHAPE = {"blocks.0.fc1.weight": np.zeros((3, 5), np.float32)}
# name -> (what is done to the folder of a small sa_quadratic network, what the message has to say)
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture on the Hub": (change_config(architecture="hf-hub:evil/x"), "hf-hub:evil/x"),
    "no architecture": (change_config(architecture=None), "architecture"),
    "another architecture": (change_config(architecture="resnet18_cifar"), "argument|weights"),
    "a CNN on the Hub": (
        change_config(architecture="mhsa_network", model_args={"cnn": "hf-hub:evil/model"}),
        "hf-hub:evil/model",
    ),
    "a billion parameters": (change_config(model_args__hidden_dim=2_500_000), "2500000"),
    "a billion parameters in small steps": (
        change_config(model_args__embed_dim=3_000, model_args__hidden_dim=50_000),
        "parameters",
    ),
    "a huge input": (change_config(pretrained_cfg__input_size=[3, 10**6, 10**6]), "input_size"),
    "a huge image": (change_config(model_args__img_size=10**6), "img_size"),
    "another interpolation": (change_config(pretrained_cfg__interpolation="x"), "interpolation"),
    "a tiny crop": (change_config(pretrained_cfg__crop_pct=1e-9), "crop_pct"),
    "NaN": (change_config(pretrained_cfg__mean=[float("nan"), 0.5, 0.5]), "NaN"),
    "a number that overflows": (config_text('{"x": 1e999}'), "1e999"),
    "a large negative number": (change_config(pretrained_cfg__x=-(2**21)), "number -2097152"),
    "a number of many digits": (config_text('{"x": 1%s}' % ("0" * 9000)), "number"),
    "a deviation of zero": (change_config(pretrained_cfg__std=[0, 0, 0]), "std"),
    "two means for three channels": (change_config(pretrained_cfg__mean=[0.5, 0.5]), "mean"),
    "text for a number": (change_config(model_args__embed_dim="many"), "embed_dim: got 'many'"),
    "deep nesting": (
        config_text('{"a":' * 100_000 + "1" + "}" * 100_000),
        "nest|recursion|overflow",
    ),
    "no JSON": (config_text("\x80evil"), "config.json"),
    "no object": (config_text("[]"), "config.json"),
    "wrong shapes": (tensors(lambda values: values.update(WRONG_SHAPE)), "weights"),
    "a missing tensor": (tensors(lambda values: values.pop(BIAS)), "weights"),
    "NaN weights": (tensors(poison), "NaN or infinity in head.bias"),
    "a shape that overflows": (weights(lambda _: OVERFLOWING), "safetensors"),
    "a huge header": (weights(lambda _: struct.pack("<Q", 2**62) + b"{}"), "safetensors"),
    "many empty tensors": (many_empty_tensors, "more than"),
    "truncated weights": (weights(lambda content: content[: len(content) // 2]), "safetensors"),
    "a pickle named model.safetensors": (
        weights(lambda _: pickle.dumps(Payload(Path("executed")))),
        "safetensors",
    ),
    "a pickle as pytorch_model.bin": (pickled, "model.safetensors"),
}
ELSEWHERE = "url file state_dict hf_hub_filename custom_load"
FACTORY = "pretrained pretrained_cfg pretrained_cfg_overlay checkpoint_path cache_dir features_only device dtype"
KEYS = [f"pretrained_cfg__{key}" for key in ELSEWHERE.split()]
KEYS += [f"model_args__{key}" for key in FACTORY.split()]
FOLDERS |= {key: (change_config(**{key: "x"}), key.replace("__", ".")) for key in KEYS}


def png(width: int, height: int, data: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG file whose header may lie about its data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    size = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def encoded(mode: str, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new(mode, (11, 7)).save(content, kind, **options)
    return content.getvalue()


BROKEN = encoded("RGB", "PNG")
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 7\n%%EOF\n"
WIDE_TIFF = encoded("RGB", "TIFF").replace(
    struct.pack("<3H", 8, 8, 8), struct.pack("<3H", 16, 16, 16)
)
FRAMES = [Image.new("RGB", (11, 7), color) for color in ("red", "blue")]
# name -> (content, what the message says; empty: read like any other image)
IMAGES: dict[str, tuple[bytes, str]] = {
    "not an image": (b"#!/bin/sh\ntouch executed\n", "cannot identify"),
    "a truncated PNG": (BROKEN[: len(BROKEN) * 2 // 3], "image"),
    "a decompression bomb": (png(60_000, 60_000, b"\0" * 1000), "bomb"),
    "a header that promises too much": (png(5000, 5000, b"\0" * 10), "image"),
    "a PostScript program": (POSTSCRIPT, "cannot identify"),
    "16 bits": (encoded("I;16", "PNG"), "got mode I"),
    "48 bits": (png(11, 7, (b"\0" + b"\1\2" * 33) * 7, depth=16), "more than 8 bits"),
    "a TIFF of 48 bits": (WIDE_TIFF, "more than 8 bits"),
    "an animation": (encoded("RGB", "GIF", save_all=True, append_images=FRAMES), ""),
}
