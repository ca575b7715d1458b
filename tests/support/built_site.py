"""The site as `make site` builds it, and what is in its pages."""

import fcntl
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

REPO = Path(__file__).parents[2]


def build_site(to: Path) -> Path:
    """Once for all who ask for the same directory; each warning is an error."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done_before = to.with_suffix(".built")
        if not done_before.exists():
            command = [sys.executable, "-m", "sphinx", "-c", ".ci/site", "--fail-on-warning", "--keep-going", "--quiet"]
            done = subprocess.run([*command, ".", to], cwd=REPO, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            done_before.touch()
    return to


class Link(NamedTuple):
    """From a page to a file, and a place in it; empty: the page itself, its beginning."""

    page: Path
    file: Path
    anchor: str


class SitePage(HTMLParser):
    """What a page has: places, links within the site, and what a browser would fetch for it from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.links: list[Link] = []
        self.fetched_elsewhere: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One after the other."""
        told = dict(attrs)
        self.anchors.update(filter(None, (told.get("id"), told.get("name"))))
        for url in filter(None, (told.get("href"), told.get("src"))):
            parts = urlsplit(url)
            if not parts.scheme and not parts.netloc:
                file = (self.path.parent / unquote(parts.path)).resolve() if parts.path else self.path
                self.links.append(Link(self.path, file, unquote(parts.fragment)))
            elif tag != "a" and parts.scheme != "data":
                self.fetched_elsewhere.append(url)


def pages_of(site: Path) -> dict[Path, SitePage]:
    """All of them."""
    return {path: SitePage(path) for path in sorted(site.resolve().rglob("*.html"))}
