"""A temporary directory into which other users may come: pytest's own are its user's alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def passable_directory(mode: int = 0o755) -> Iterator[Path]:
    """A fresh one, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="passable-") as name:
        Path(name).chmod(mode)
        yield Path(name)
