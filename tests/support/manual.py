"""The pages of the manual as they are made, and files for man(1) of them."""

from pathlib import Path

from build_docs.man_pages import format_names, page_names, page_of, title_of, write_all
from fusefs.cli.service import PACKAGES, pieces_for_all

PARTS = Path(__file__).parents[2] / "docs/man"
write_all(Path(__file__).parents[2] / "build/man")  # so that they are of the commands as they are
TITLES = [title_of(name) for name in page_names()]
FORMATS = format_names()
MAN_FILES = [*(f"man1/{title}.1" for title in TITLES), *(f"man5/{name}" for name in FORMATS)]
"""The installed pages, below the directory of manual pages."""


def page(name: str) -> str:
    """Markdown of a command's."""
    return page_of(name, (PARTS / f"{name}.md").read_text(encoding="utf-8"))


def sources() -> dict[str, bytes]:
    """What is installed for man(1), by the names of files."""
    return {
        piece.path.rpartition("/")[2]: piece.content
        for piece in pieces_for_all(PACKAGES)
        if "/man/" in piece.path and piece.content is not None
    }
