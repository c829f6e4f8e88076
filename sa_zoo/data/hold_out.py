"""Which images are held out of training. The choice depends on the bytes or the name of each image."""

import math
from dataclasses import replace

import numpy as np

from sa_zoo.data.images import LabeledImages
from sa_zoo.folders.metrics import HeldOut

SPLITS = ("train", "validation", "test")
TEST_SHARE = 0.2  # of a data set without a test split
HOLD_OUT = 6  # the stream of random numbers; training/augment.py lists the others
Rows = dict[str, tuple[str, np.ndarray]]  # split -> (table of the data, rows of that table)


def counter_hash(*counters: int | np.ndarray) -> np.ndarray:
    """64-bit hash of integers: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), chained over them."""
    state: np.ndarray = np.zeros(1, np.uint64)
    for counter in counters:
        state = state + np.asarray(counter).astype(np.uint64) + 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
    return state


def drawn_for(data: LabeledImages, kept: bool) -> LabeledImages:
    """The data, drawn by content if they are read before training or have images without names; otherwise by name."""
    by_name = all(data.images["train"].names) and not kept
    return replace(data, drawn_by="name" if by_name else "content")


def rows_of(data: LabeledImages, validation: float) -> Rows:
    """The rows of each split. Missing splits are held out of "train", in the order of the hashes."""
    rows = {name: (name, np.arange(len(labels))) for name, labels in data.labels.items()}
    shares = {"test": TEST_SHARE, "validation": validation}
    held_out = {name: share for name, share in shares.items() if name not in rows}
    _, train = rows["train"]
    if any(held_out.values()):
        train = np.argsort(data.hashes, kind="stable")
    for name, share in held_out.items():
        held = np.zeros(len(train), bool)
        if share:
            held = _held_out(_draws(data, name)[train], data.labels["train"][train], share)
        rows[name] = "train", train[held]
        train = train[~held]
    rows["train"] = "train", train
    return rows


def largest_draws(data: LabeledImages, rows: np.ndarray) -> HeldOut:
    """The largest draw of the test images in these rows, by class. Every image with a larger draw is not held out."""
    draws, labels = _draws(data, "test")[rows], data.labels["train"][rows]
    largest = {data.classes[x]: float(draws[labels == x].max()) for x in np.unique(labels)}
    return HeldOut(by=data.drawn_by, largest=largest)


def rows_below(data: LabeledImages, held_out: HeldOut) -> Rows:
    """The test split of any data: the images that a run with these largest draws would have held out."""
    data = replace(data, drawn_by=held_out.by)
    limits = np.array([held_out.largest.get(name, -1.0) for name in data.classes])
    held = _draws(data, "test") <= limits[data.labels["train"]]
    return {"test": ("train", np.flatnonzero(held))}


def _draws(data: LabeledImages, split: str) -> np.ndarray:
    """The draw of each image, from 0 to 1."""
    return counter_hash(HOLD_OUT, SPLITS.index(split), data.hashes) / 2.0**64


def _held_out(draws: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Whether each image is held out: its draw is below the share, independent of other images.

    Small classes may be far from the share. Their lowest draws then bring the count to at least half the share and at
    most one and a half: every class of several images has some held out, and keeps some.
    """
    held = np.zeros(len(draws), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        own = draws[members]
        expected = share * len(members)
        least = math.ceil(expected / 2)
        most = min(max(least, int(1.5 * expected)), len(members) - 1)
        count = max(least, int((own < share).sum()))
        held[members[own.argsort(kind="stable")[: min(count, most)]]] = True
    return held
