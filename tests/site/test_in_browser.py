"""What a reader's browser makes of the site, without a network: search, and a narrow screen.

TRASHD_TEST_PICTURES=DIRECTORY  leaves pictures of pages there, to be looked at
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Tab, browser

pytestmark = [pytest.mark.every, pytest.mark.needs("chromium"), pytest.mark.timeout(600)]

WIDE, NARROW = (1440, 900), (360, 740)
PICTURED = (
    "docs/index",
    "README",
    "docs/howto/faq",
    "docs/howto/troubleshooting",
    "docs/man/swap",
    "docs/explain/performance",
    "docs/howto/run-the-reaper",
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as tab:
        yield tab


def picture(tab: Tab, name: str) -> None:
    """Take one, if somebody wants to look at it."""
    if to := os.environ.get("TRASHD_TEST_PICTURES"):
        Path(to).mkdir(parents=True, exist_ok=True)
        tab.picture(Path(to) / f"{name.replace('/', '-')}.png")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("restore", "docs/man/restore.html"),
        ("root squash", "docs/howto/troubleshooting.html"),
        ("--keep-for", "docs/man/swap.html"),
        ("seccomp", "docs/howto/troubleshooting.html"),
    ],
)
def test_search_has_among_the_first(site: Path, tab: Tab, words: str, page: str) -> None:
    tab.resize(*WIDE)
    tab.problems.clear()
    tab.open(f"{site.as_uri()}/search.html?q={words.replace(' ', '+')}")
    assert [one for one in tab.problems if "SyntaxError" in one] == []
    tab.wait_for("document.querySelector('#search-results .search-summary')?.textContent.includes('found')")
    found = tab.evaluate("[...document.querySelectorAll('#search-results li a')].map(one => one.href)")
    assert any(page in one for one in found[:5]), found
    picture(tab, f"search-{words.replace(' ', '-')}")


def test_the_way_in_shows_the_first_page(site: Path, tab: Tab) -> None:
    tab.open(f"{site.as_uri()}/index.html", n_pages=2)
    assert tab.evaluate("location.href") == f"{site.as_uri()}/docs/index.html"


def test_no_page_is_wider_than_a_telephone(site: Path, tab: Tab) -> None:
    tab.resize(*NARROW)
    wide = {}
    for page in sorted(site.rglob("*.html")):
        if page.parent == site and page.stem == "index":
            continue  # it leads on
        tab.open(page.as_uri())
        width = tab.evaluate("document.documentElement.scrollWidth")
        if width > NARROW[0]:
            wide[str(page.relative_to(site))] = width
    assert wide == {}


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", PICTURED)
def test_a_page_has_all_its_pictures_and_complains_of_nothing(
    site: Path, tab: Tab, name: str, size: tuple[int, int]
) -> None:
    tab.resize(*size)
    tab.problems.clear()
    tab.open(f"{site.as_uri()}/{name}.html")
    assert (
        tab.evaluate("[...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)") == []
    )
    picture(tab, f"{name}-{size[0]}")
    assert tab.problems == []
