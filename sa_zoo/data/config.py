"""The section `data` of a recipe."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from sa_zoo.folders.check import LARGEST


class Section(BaseModel):
    """Types are strict: TOML is typed, so a number in quotes is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Text = Annotated[str, Field(min_length=1)]
Pixels = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Section):
    name: Text = "uoft-cs/cifar10"  # Hub data set, folder, or "digits"
    revision: str = ""  # revision of a Hub data set; empty: the newest
    config: str = ""  # configuration of a Hub data set, or a folder in the folder; empty: none
    train_split: str = ""  # name of a split; empty: the usual one
    validation_split: str = ""
    test_split: str = ""  # empty: the usual one, or else the validation split
    workers: int = Field(-1, ge=-1)  # processes that decode images of a large set; -1: one per core
    title: str = ""  # name of the data in results; empty: `name`
    label_column: str = ""  # empty: the one ClassLabel column, or the usual name
    image_size: Pixels = 0  # of a side; 0: the model's own
    hash_content: bool = False  # hold out by content even if the data are too large to keep
    validation: Fraction = 0.1  # of the training images, held out if there is no validation split
