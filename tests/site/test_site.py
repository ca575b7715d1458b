"""The site is all of the documents, its links lead somewhere, and it needs no network."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.built_site import REPO, Link, SitePage, pages_of

pytestmark = [pytest.mark.every, pytest.mark.timeout(600)]
"""To build it takes twenty seconds of a processor."""


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, SitePage]:
    return pages_of(site)


def is_found(link: Link, pages: dict[Path, SitePage]) -> bool:
    """Whether what a link names is there."""
    if not link.anchor or link.file not in pages:
        return link.file.exists()
    return link.anchor in pages[link.file].anchors


def test_every_document_is_a_page(site: Path) -> None:
    documents = [path for path in REPO.glob("docs/**/*.md") if "changes" not in path.parts]
    documents += [REPO / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    named = {path: site / path.relative_to(REPO).with_suffix(".html") for path in documents}
    assert [path for path, page in named.items() if not page.exists()] == []


def test_every_link_leads_somewhere(pages: dict[Path, SitePage]) -> None:
    links = [link for page in pages.values() for link in page.links]
    assert len(links) > 10_000
    assert [link for link in links if not is_found(link, pages)] == []


def test_no_page_fetches_anything_from_elsewhere(pages: dict[Path, SitePage]) -> None:
    assert {path: page.fetched_elsewhere for path, page in pages.items() if page.fetched_elsewhere} == {}


def test_the_way_in_is_the_first_page(site: Path) -> None:
    assert "url=docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("restor", "docs/man/restore"),
        ("undo", "docs/howto/get-it-back"),
        ("squash", "docs/howto/clusters"),
        ("quarantin", "docs/howto/troubleshooting"),
    ],
)
def test_the_search_knows_a_word(site: Path, word: str, page: str) -> None:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = [index[where].get(word, []) for where in ("terms", "titleterms")]
    numbers = {number for one in found for number in (one if isinstance(one, list) else [one])}
    assert page in {index["docnames"][number] for number in numbers}


def test_a_mans_page_has_what_its_command_says(site: Path) -> None:
    text = re.sub("<[^>]*>", "", (site / "docs/man/undo.html").read_text(encoding="utf-8"))
    assert "Restore everything that your last swap, rm or sweep in this terminal removed." in text
    assert "A command that sudo(8) runs in a separate terminal" in text
