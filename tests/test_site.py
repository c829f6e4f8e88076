"""docs/ and README.md build as a site, without a warning, and every link leads to a file of the site."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]


class Links(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.found |= {unquote(urlsplit(value).path) for name, value in attrs
                       if name in ("href", "src") and value and not urlsplit(value).netloc}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    subprocess.run(build, cwd=ROOT, check=True)
    return folder


def test_every_document_is_a_page_that_can_be_chosen(site):
    home = Links((site / "index.html").read_text(encoding="utf-8")).found
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / path.stem / "index.html").is_file()
        assert f"{path.stem}/" in home


def test_links_lead_to_files_of_the_site(site):
    pages = list(site.rglob("index.html"))
    assert any("model_cards" in page.parts for page in pages)
    for page in pages:
        for link in filter(None, Links(page.read_text(encoding="utf-8")).found):
            target = (page.parent / link).resolve()
            assert target.is_file() or (target / "index.html").is_file(), f"{link} in {page}"
