"""A missing library becomes one sentence, which names the extra of pyproject.toml that installs it."""

# Import names of the libraries of each extra.
EXTRAS = {
    "train": ("accelerate", "datasets", "pydantic", "tomli_w", "tqdm", "typer"),
    "hf": ("transformers",),
    "explore": ("jinja2", "matplotlib", "sklearn"),
}


def explained(error: ModuleNotFoundError) -> str:
    """The sentence for this error; its own message if no extra installs the library."""
    library = str(error.name).partition(".")[0]
    for extra, libraries in EXTRAS.items():
        if library in libraries:
            return f"got no {library}, expected it: pip install 'sa_zoo[{extra}]'"
    return str(error)
