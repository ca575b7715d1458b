"""Test suites that others wrote, from crates.io: built once, outside the tree.

python -m tests.support.suites        build what is missing
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

VERSIONS = MappingProxyType({"pjdfstest": "0.2.2", "fsx": "0.3.2"})
_BUILD_LIMIT_S = 900


def cache() -> Path:
    """Where they are kept; root's is not in a home directory that tests change."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "trashd-tests")


def suite(name: str) -> Path:
    """The program of a suite, built if it is missing: needs cargo, the network and a minute or two.

    Raises  CalledProcessError: cargo could not; its words are on stderr
    """
    root = cache() / f"{name}-{VERSIONS[name]}"
    program = root / "bin" / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at a time build once
        if not program.exists():
            what = ["--root", str(root), "--version", VERSIONS[name], name]
            subprocess.run(
                ["cargo", "install", "--quiet", "--locked", *what],
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=_BUILD_LIMIT_S,
            )
    return program


def main() -> None:
    """Build all."""
    for name in VERSIONS:
        print(f"{name} {VERSIONS[name]}: {suite(name)}", file=sys.stderr)


if __name__ == "__main__":
    main()
