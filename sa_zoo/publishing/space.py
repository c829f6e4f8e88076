"""The explorer of a model as a static Space: a page on the Hub, opened in a browser."""

from huggingface_hub import SpaceCardData

README = """---
{metadata}
---

What the attention heads of [{repo_id}]({url}) look at, for any query pixel. The page needs no server and sends nothing.
Its two photographs come with scikit-learn (CC BY 2.0).
"""


def space_files(manifest: dict[str, bytes], repo_id: str, url: str) -> dict[str, bytes]:
    """The files of the Space for a model with these checked files, published as `repo_id` at `url`.

    Raises ValueError for a model without an explorer.
    """
    if "explorer.html" not in manifest:
        raise ValueError(
            "--space: got a folder without explorer.html, expected one: `sa-zoo card` writes it "
            "for a network whose attention can be shown"
        )
    network = repo_id.partition("/")[2]
    metadata = SpaceCardData(
        title=f"Attention of {network}", sdk="static", app_file="index.html", models=[repo_id]
    )
    readme = README.format(metadata=metadata.to_yaml(), repo_id=repo_id, url=url)
    return {"README.md": readme.encode(), "index.html": manifest["explorer.html"]}
