"""What users see of trashd, written down, so that a step that only moves, renames and merges can be held against it.

    python -m tests.renaming.frozen check          the differences; exit code 1 if there are any
    python -m tests.renaming.frozen write [PART…]  today's state becomes what is frozen

A difference that is meant is written in the commit that decides it, and so is seen there. A merge that says once what
was said twice lowers a count in strings.txt and numbers.txt: write that with the merge. Where two branches did so, take
either side of the file and write anew: it holds nothing but what the source says.

Help texts and JSON of commands are goldens of tests/cli/test_golden.py; of these, the man page, units, the example of a
configuration, the dashboard and stored records digests are kept here, so that a golden that is changed is seen too.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.renaming import constants, declared, played
from tests.unit.test_import_cost import list_modules

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("frozen")
_MOST_LINES = 200
_DIGESTED = (
    "docs/man/*", "docs/*.toml", "docs/*.json", "systemd/**/*", "tests/cli/golden/*", "tests/store/samples/*",
    "tests/unit/samples/*",
)  # fmt: skip


def digests() -> str:
    """The digests of files that users have, and of goldens that other tests hold."""
    paths = sorted(path for pattern in _DIGESTED for path in ROOT.glob(pattern) if path.is_file())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}\n" for path in paths)


def modules_of_swap() -> str:
    """How many modules a plain `trashd swap` imports, more than which it must not become, and how many are ours."""
    loaded = list_modules("import fusefs.cli.main, fusefs.cli.swap_fast_lane")
    return f"{len(loaded)} modules, {sum(name.startswith('fusefs') for name in loaded)} of them fusefs's\n"


PARTS: dict[str, Callable[[], str]] = {
    "digests": digests,
    "modules_of_swap": modules_of_swap,
    "strings": lambda: constants.text_of(constants.count_constants().strings),
    "numbers": lambda: constants.text_of(constants.count_constants().numbers),
    "errors": declared.errors,
    "enums": declared.enums,
    "structs": declared.structs,
    "tuples": declared.tuples,
    "metrics": declared.metrics,
    "events": declared.events,
    "helps": declared.helps,
    "scene": played.scene,
    "wrong_calls": played.wrong_calls,
    "for_user": played.for_user,
    "samples": played.samples,
    "installed": played.installed,
}


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    names = arguments[1:] or list(PARTS)
    if arguments[:1] not in (["write"], ["check"]) or not set(names) <= set(PARTS):
        print(f"usage: {__spec__.name} write|check [{'|'.join(PARTS)}]…", file=sys.stderr)
        return 2
    played.enter()
    try:
        declared.import_all()
        lines = _write(names) if arguments[0] == "write" else _differences(names)
    finally:
        played.leave()
    for line in lines[:_MOST_LINES]:
        print(line.encode("utf-8", "backslashreplace").decode())
    if len(lines) > _MOST_LINES:
        print(f"… and {len(lines) - _MOST_LINES} lines more")
    return 1 if lines else 0


def _write(names: Sequence[str]) -> list[str]:
    for name in names:
        _file(name).write_text(PARTS[name](), encoding="utf-8", errors="surrogateescape")
    return []


def _differences(names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for name in names:
        before = _file(name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        now = PARTS[name]().splitlines()
        lines += difflib.unified_diff(before, now, f"frozen/{name}.txt", "now", n=2, lineterm="")
    return lines


def _file(name: str) -> Path:
    return FROZEN / f"{name}.txt"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
