"""The `sa-zoo` command, also as `python -m sa_zoo`."""

import os
import sys

from sa_zoo.extras import explained


def main() -> None:
    # Threads that wait for each other in a loop take the cores from other work. OpenMP reads this with torch's import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from sa_zoo.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: {explained(error)}")
    app(prog_name="sa-zoo")


if __name__ == "__main__":
    main()
