"""Leases on files, as the kernel tells of them."""

import os
from pathlib import Path


def is_broken_into(st: os.stat_result) -> bool:
    """Whether somebody waits for the end of a lease on that file: there may be other leases on the machine."""
    file = f" {os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}:{st.st_ino} "
    return any(" BREAKING " in line and file in line for line in Path("/proc/locks").read_text().splitlines())
