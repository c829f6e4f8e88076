"""What the data of a run were: names and sizes of the images, their classes and splits. Nothing is read or decoded."""

from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel

from sa_zoo.training.sources import Source


class Digest(BaseModel):
    """Equal for equal data, wherever their folder is. It does not notice other pixels of the same size."""

    classes: list[str]
    images: dict[str, int]  # in each split
    ordered: str  # hash of name, size and class of every image
    sorted: str  # the same, whatever their order

    def sum(self) -> str:
        return _sum([*self.classes, self.ordered])

    def changes_since(self, before: "Digest") -> str:
        """What is different, in words."""
        now, then = set(self.classes), set(before.classes)
        found = [f"{name}, a new class" for name in sorted(now - then)]
        found += [f"no class {name}" for name in sorted(then - now)]
        for split in sorted(self.images | before.images):
            had, has = before.images.get(split, 0), self.images.get(split, 0)
            if had != has:
                found.append(f"{has} images in {split}, not {had}")
        if not found and self.sorted == before.sorted:
            return "the same images in another order"
        return "; ".join(found) or "images of other names, sizes or classes"


def digest_of(source: Source) -> Digest:
    lines = []
    for split, labels in sorted(source.labels.items()):
        files = source.images[split].names_and_sizes()
        for (path, size), label in zip(files, labels.tolist(), strict=False):  # no label: not used
            lines.append(f"{split} {Path(path).name} {size} {label}")
    return Digest(
        classes=list(source.classes),
        images={split: len(labels) for split, labels in source.labels.items()},
        ordered=_sum(lines),
        sorted=_sum(sorted(lines)),
    )


def _sum(lines: list[str]) -> str:
    return sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()
