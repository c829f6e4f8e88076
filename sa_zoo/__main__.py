"""`python -m sa_zoo` is `sa-zoo`."""

from sa_zoo.cli import app

app(prog_name="sa-zoo")
