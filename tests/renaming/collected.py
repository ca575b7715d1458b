"""python -m tests.renaming.collected BEFORE.txt AFTER.txt [MAP.toml…]: whether the same tests are collected.

Each list is what `.ci/pytest --collect-only -q` printed. Moved test files are looked for where the maps put them, and
renamed tests and classes by their new names.
"""

import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from tests.renaming.plan import Map, module_of, path_of, read_map

_TEST = re.compile(r"(?P<path>\S+?\.py)::(?P<names>[^\[]+)(?P<case>\[.*\])?")


_MODULE = re.compile(r"(?<![\w.])(?:fusefs|tests|bench)(?:\.\w+)+")


def _moved(names: Map, told: re.Match[str]) -> str:
    return names.moved(told.group())


def moved_test(line: str, maps: list[Map]) -> str:
    """A test's id under the maps."""
    found = _TEST.fullmatch(line)
    if found is None:
        return line
    module, names, case = module_of(found["path"]), found["names"].split("::"), found["case"] or ""
    for one in maps:
        renamed = one.names.get(module, {})
        names = [renamed.get(".".join(names[: n + 1]), name) for n, name in enumerate(names)]
        parents = [old for old in one.modules if module == old or module.startswith(f"{old}.")]
        longest = max(parents, key=len, default=module)
        module = one.moved(longest) + module.removeprefix(longest)
        case = _MODULE.sub(partial(_moved, one), case)
    return f"{path_of(module, is_package=False)}::{'::'.join(names)}{case}"


def _is_test(line: str) -> bool:
    """The tool's own tests don't count: they come and go with it."""
    return "::" in line and not line.startswith("tests/renaming/")


def differences(before: list[str], after: list[str], maps: list[Map]) -> list[str]:
    """Which tests are gone (-) or new (+), each as often as it is collected."""
    olds = Counter(moved_test(line, maps) for line in before if _is_test(line))
    news = Counter(line for line in after if _is_test(line))
    return [f"- {test}" for test in sorted((olds - news).elements())] + [
        f"+ {test}" for test in sorted((news - olds).elements())
    ]


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 2
    before, after = (Path(path).read_text(encoding="utf-8").splitlines() for path in arguments[:2])
    found = differences(before, after, [read_map(Path(path)) for path in arguments[2:]])
    print(*found, sep="\n", end="\n" if found else "")
    n_tests = sum(map(_is_test, before))
    print(f"{n_tests} tests, {len(found)} differences" if found else f"the same {n_tests} tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
