"""Results of one process for all processes that a launcher started."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

Result = TypeVar("Result")


def shared(make: Callable[[], Result], per_machine: bool = False) -> Result:
    """The result of `make` in the main process, or in the first one of each machine, for all. So are its errors.

    Data and folders of a machine need not exist on another one.
    """
    if not distributed.is_initialized():
        return make()
    group = None
    if per_machine:
        group, _ = distributed.new_subgroups(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    made: list[Any] = [None]
    if distributed.get_rank(group) == 0:
        try:
            made = [make()]
        except Exception as error:
            made = [error]
    distributed.broadcast_object_list(made, group=group, group_src=0)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]
