"""Faults that were mended, as replacements of text in files of today: faults.toml."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.toml")


class NotThere(Exception):
    """The old text of a fault is not in its file, or is there more than once"""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that was mended.

    wrong       what went wrong for users, one sentence
    mended      the commit that mended it
    file        of the product; `old` is in it exactly once, and `new` in its place is the fault again
    test        of the mend, the name of its function: a module may get another name
    is_some_cases  only some cases of the mend's parametrized test fail
    """

    name: str
    wrong: str
    mended: str
    file: str
    old: str
    new: str
    test: str
    is_some_cases: bool = False

    def package(self) -> str:
        """Name the package that has the file."""
        return self.file.split("/")[1]

    def text(self, root: Path) -> str:
        """Return the whole file with the fault. Raises  NotThere"""
        whole = (root / self.file).read_text(encoding="utf-8")
        if (n := whole.count(self.old)) != 1:
            raise NotThere(f"{self.name}: its old text is {n} times in {self.file}, not once; mend {LIST.name}")
        return whole.replace(self.old, self.new)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault]


def read_faults() -> list[Fault]:
    """Read the list. Raises  msgspec.DecodeError"""
    return msgspec.toml.decode(LIST.read_bytes(), type=_Document).fault


@cache
def _files_of_tests() -> dict[str, list[str]]:
    """Find the modules that have a test of each name."""
    files = defaultdict[str, list[str]](list)
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            files[name].append(str(path.relative_to(ROOT)))
    return files


def find_test(fault: Fault) -> list[str]:
    """Return the node ids of the mend's test; none if it is gone."""
    return [f"{file}::{fault.test}" for file in _files_of_tests().get(fault.test, ())]
