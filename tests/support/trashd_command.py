"""`trashd` as people run it: the real console script, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.transports import ring_words

_WITH_A_WORD = ("passthrough", "uring")
"""Fast paths that have an option of their own."""
TRASHD = str(Path(sys.executable).with_name("trashd"))


def switched_off() -> set[str]:
    """The fast paths that no mount of this run has: `make fast-paths` switches off one after the other."""
    return set(os.environ.get("TRASHD_TEST_WITHOUT", "").split())


def fast_paths_off() -> list[str]:
    """The fast paths that no mount of this run has, as options of a mount."""
    return [f"{name}=off" if name in _WITH_A_WORD else f"without={name}" for name in switched_off()]


class CommandResult(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects of its output, one from each line."""
        return [json.loads(line) for line in self.out.splitlines()]


def trashd(*words: str | bytes | Path, cwd: Path | None = None, stdin: bytes = b"", **variables: str) -> CommandResult:
    """Run `trashd WORDS`, with some environment variables added."""
    if words[:1] == ("mount",) and not {"--explain", "--help"} & set(words):
        off = fast_paths_off()
        first = ring_words([*(os.fsdecode(word) for word in words), *off])
        words = ("mount", *_each(first), *words[1:], *_each(off))
    done = subprocess.run(
        [TRASHD, *words], cwd=cwd, input=stdin, capture_output=True, env=environment(variables), check=False
    )
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def _each(options: list[str]) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """An environment that has commands print alike on every machine: 80 columns, UTF-8, no colours."""
    return {**os.environ, "COLUMNS": "80", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", **added}


def done_well(*words: str | bytes | Path, cwd: Path | None = None, stdin: bytes = b"") -> CommandResult:
    """Run `trashd WORDS`, which has to succeed."""
    done = trashd(*words, cwd=cwd, stdin=stdin)
    assert done.code == 0, done
    return done


def swapped(victim: Path, *options: str) -> dict[str, Any]:
    """What `trashd swap --json` says of one directory."""
    (told,) = done_well("swap", "--json", *options, victim).objects()
    return told
