"""Volumes as versions before made them, from tests/store/samples/."""

from __future__ import annotations

import tarfile
from pathlib import Path

SOUND, PLANTED = "store-1.tar.xz", "store-1-planted.tar.xz"
"""Of the first format: with root's orphan and a user's; and with what others had moved into it."""
_SAMPLES = Path(__file__).parents[1] / "store/samples"


def unpack(sample: str, volume: Path) -> None:
    """Put a sample's store into a volume, with its owners; a bare machine has no xz(1)."""
    with tarfile.open(_SAMPLES / sample) as archive:
        archive.extraction_filter = lambda member, _path: member  # it is ours; Python 3.14 would give all to us
        archive.extractall(volume, numeric_owner=True)
