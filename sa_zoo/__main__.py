"""The `sa-zoo` command, also as `python -m sa_zoo`."""

import sys

from sa_zoo.extras import explained


def main() -> None:
    try:
        from sa_zoo.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: {explained(error)}")
    app(prog_name="sa-zoo")


if __name__ == "__main__":
    main()
