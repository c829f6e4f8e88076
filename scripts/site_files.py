"""Hook of mkdocs.yml: the site has README.md as its first page, and the files outside of docs/ that its pages link to.

Documents are written to be read in the repository, where a link leads from docs/ to ../model_cards/. On the site, whose
root is docs/, the same file is at model_cards/.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"""(?<=\]\()[^)\s]+(?=\))|(?<=src=")[^"]+""")
OUTSIDE = (
    "model_cards",
    "results",
    "sa_zoo",
    "scripts",
    "configs",
    "examples",
    "LICENSE",
    "CITATION.cff",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and every file of the repository that a page of docs/ or it links to."""
    pages = {"index.md": ROOT / "README.md"}
    pages |= {file.src_uri: Path(str(file.abs_src_path)) for file in files.documentation_pages()}
    while pages:
        uri, path = pages.popitem()
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        if path.suffix != ".md":
            continue
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            target = (path.parent / link.partition("#")[0]).resolve()
            inside = target.is_relative_to(ROOT) and target.is_file()
            if inside and target.relative_to(ROOT).parts[0] in OUTSIDE:
                found = target.relative_to(ROOT).as_posix()
                if files.get_file_from_path(found) is None:
                    pages[found] = target
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site."""
    if page.file.src_uri == "index.md":
        return LINK.sub(lambda link: link[0].removeprefix("docs/"), markdown)
    if "/" not in page.file.src_uri:
        return LINK.sub(lambda link: link[0].removeprefix("../"), markdown)
    return markdown
