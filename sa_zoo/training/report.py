"""What was understood of a data set, for people to read before anything is trained or measured on it."""

import hashlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from io import BytesIO
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
from accelerate import PartialState
from pydantic import BaseModel
from tqdm import tqdm

from sa_zoo.training.config import AugmentConfig
from sa_zoo.training.model import InputFormat
from sa_zoo.training.pictures import size_of_picture
from sa_zoo.training.progress import interruptible
from sa_zoo.training.sources import Source

FEW = 2_000  # pictures, which are all decoded before a run; of more, only the headers are read
SHOWN = 3  # of the items of a long list
