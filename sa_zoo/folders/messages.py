"""Parts of error messages."""

import difflib
from collections.abc import Iterable, Sequence

from pydantic import ValidationError

LISTED = 5  # names of a long list


def mistakes(error: ValidationError) -> str:
    """All mistakes found by pydantic, as "key: got value: reason"."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: got {each['input']!r}: {each['msg']}"
        for each in error.errors()
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known name, if any is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def listed(names: Sequence[object]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(str, names[:LISTED])) + more
