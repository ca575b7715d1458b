"""Times of access: below they are kept, or not, as the options of a mount over itself say."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import backing_of, mount, workbench

pytestmark = pytest.mark.needs("root", "fuse")

LONG_AGO_NS = 10**18


@pytest.fixture
def bench() -> Iterator[Path]:
    with workbench() as path:
        (path / "source/inside").mkdir()
        for name in ("file", "inside"):
            os.utime(path / "source" / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
        yield path


def keeps(source: Path, *words: str) -> set[str]:
    """Mount over itself, read a file and a directory in it; of which of them the time of access is another then."""
    mount(source, *words)
    (source / "file").read_text()
    os.listdir(source / "inside")
    return {name for name in ("file", "inside") if (backing_of(source) / name).stat().st_atime_ns != LONG_AGO_NS}


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [("rw", {"file", "inside"}), ("nodiratime", {"file"}), ("noatime", set()), ("noatime,nodiratime", set())],
)
def test_over_itself_times_of_access_are_kept_as_the_options_say(
    bench: Path, options: str, kept: set[str], passthrough: str
) -> None:
    assert keeps(bench / "source", "-o", f"{options},passthrough={passthrough}") == kept
