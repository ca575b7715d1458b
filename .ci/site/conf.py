"""Builds the site from the documents as they are: `make site`, docs/internals/decisions/0053-releases-and-manual.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from build_docs.man_pages import format_names, page_names, page_of  # noqa: E402

project = "trashd"
html_title = "trashd"
extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = html_show_copyright = html_show_sphinx = False
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "docs/changes", "fusefs", "tests"]
root_doc = "docs/index"
myst_heading_anchors = 4
nitpicky = True
pygments_style = "friendly"
smartquotes = False  # what is typed is quoted as it is typed

_PART = re.compile(r"^## (?P<title>.*)\n\n(?P<list>(?:- .*\n)+)", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<file>[^)#:]+)\)")
_MAN_PAGE = re.compile(r"\btrashd(?:-(?P<name>[a-z]+))?\(1\)|\b(?P<format>trashd[.-][a-z]+)\(5\)")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
    app.connect("build-finished", _enter)


def _prepare(_app: Sphinx, name: str, source: list[str]) -> None:
    """A document as Sphinx wants it: readers of the files see none of this."""
    page, text = Path(name), source[0]
    if page.parent == Path("docs/man"):
        # Its name is in the heading; in the text others are linked to.
        heading, _, rest = (text if page.name in format_names() else page_of(page.name, text)).partition("\n")
        text = f"{heading}\n{_MAN_PAGE.sub(_linked, rest)}"
    text = _LINK.sub(lambda link: link["text"] if (ROOT / page.parent / link["file"]).is_dir() else link[0], text)
    if name == root_doc:
        text = _PART.sub(_with_contents, text)
    elif page.name == "README" and page.parent != Path():
        text += _contents("", ["*"], ":glob:")
    elif name == "docs/man/trashd":
        text += _contents("", [*(one for one in page_names() if one != "trashd"), *format_names()])
    source[0] = text


def _linked(page: re.Match[str]) -> str:
    file = page["name"] or "trashd" if page["format"] is None else f"{page['format']}.5"
    return f"[{page[0]}]({file}.md)"


def _with_contents(part: re.Match[str]) -> str:
    pages = [f"{link['text']} <{link['file']}>" for link in _LINK.finditer(part["list"])]
    return part[0] + _contents(part["title"], pages)


def _contents(caption: str, pages: list[str], *options: str) -> str:
    told = [f":caption: {caption}"] if caption else []
    return "\n".join(["", "```{toctree}", ":hidden:", *told, *options, "", *pages, "```", ""])


def _enter(app: Sphinx, error: Exception | None) -> None:
    """The way in, where people look for it."""
    if error is not None:
        return
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>trashd</title>
<meta http-equiv="refresh" content="0; url={root_doc}.html"></head>
<body><a href="{root_doc}.html">trashd</a></body></html>
"""
    (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")
