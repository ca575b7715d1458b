"""Renaming finds every use and nothing else; the proof finds what is no renaming."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.renaming import apply
from tests.renaming.collected import differences
from tests.renaming.plan import Map, Refused, read_map
from tests.renaming.same import compare, tree_of

CREW = '''
"""Workers."""

LIMIT = 3


class Crew:
    """A crew; `Crew.lend` gives one of LIMIT."""

    def __init__(self) -> None:
        self.n_lent = 0

    def lend(self, *, crew: str = "") -> int:
        self.n_lent += 1
        return LIMIT
'''
OTHER = '''
"""Another crew."""

from typing import NamedTuple


class Crew(NamedTuple):
    """Of a ship."""

    size: int = 0

    def lend(self) -> int:
        return self.size


class Captain(Crew):
    """The first of them."""
'''
USES = '''
"""Uses of fusefs.reaper.crew, `reaper/crew` and reaper/crew.py."""

import fusefs.reaper.crew
import fusefs.reaper.crew as hands
from fusefs.core import crew as ship
from fusefs.reaper import crew, pace
from fusefs.reaper.crew import LIMIT, Crew

NAMES = {"module": "fusefs.reaper.crew", "file": "fusefs/reaper/crew.py", "word": "crew"}


def late(captain: "Crew", other: ship.Crew) -> int:
    from fusefs.reaper.crew import Crew as Lazy

    size = ship.Crew(size=2)._replace(size=3).size
    lent = captain.lend(crew="x") + Lazy().lend() + other.lend() + crew.Crew().n_lent
    return size + lent + hands.LIMIT + fusefs.reaper.crew.LIMIT + LIMIT + pace.PACE
'''
FILES = {
    "fusefs/__init__.py": '"""The project."""\n',
    "fusefs/core/__init__.py": '"""Values."""\n',
    "fusefs/core/crew.py": OTHER,
    "fusefs/reaper/__init__.py": '"""Reaps."""\n',
    "fusefs/reaper/crew.py": CREW,
    "fusefs/reaper/pace.py": '"""Paces."""\n\nPACE = 1\n',
    "fusefs/uses.py": USES,
    "docs/architecture.md": "`reaper/crew` makes a `Crew`; crew is a word, fusefs.reaper.crew:Crew.lend a method.\n",
}
MOVE = """
[modules]
"fusefs.reaper.crew" = "fusefs.engine.workers"
[packages]
"fusefs.engine" = "Runs."
"""
NAMES = """
[names]
"fusefs.reaper.crew:Crew" = "Pool"
"fusefs.reaper.crew:Crew.lend" = "borrow"
"fusefs.core.crew:Crew.size" = "n_sailors"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text.lstrip("\n"))
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def map_of(root: Path, text: str) -> Map:
    (root / "map.toml").write_text(text)
    return read_map(root / "map.toml")


def run(root: Path, text: str) -> Map:
    names = map_of(root, text)
    apply.write(root, apply.work_out(root, names))
    return names


def use(root: Path) -> str:
    """What the program says; it ends with an error where a name is left behind."""
    program = "import fusefs.uses as u; print(u.late((getattr(u, 'Pool', 0) or u.Crew)(), u.ship.Crew(4)))"
    return subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True).stdout


def test_a_module_is_found_in_every_form_of_import_and_text(root: Path) -> None:
    before = use(root)
    names = run(root, MOVE)
    uses = (root / "fusefs/uses.py").read_text()
    assert use(root) == before
    assert "Uses of fusefs.engine.workers, `engine/workers` and engine/workers.py" in uses
    assert "from fusefs.engine import workers\n" in uses
    assert "from fusefs.reaper import pace\n" in uses
    for text in ('"module": "fusefs.engine.workers"', '"file": "fusefs/engine/workers.py"', '"word": "crew"'):
        assert text in uses
    assert "workers.Crew().n_lent" in uses
    assert 'lend(crew="x")' in uses
    assert (root / "docs/architecture.md").read_text().startswith("`engine/workers` makes a `Crew`; crew is a word")
    assert not (root / "fusefs/reaper/crew.py").exists()
    assert compare(tree_of(root, "HEAD"), tree_of(root, None), [names]).differences == []


def test_a_class_and_its_members_are_told_from_others_of_their_name(root: Path) -> None:
    before = use(root)
    names = run(root, NAMES)
    uses = (root / "fusefs/uses.py").read_text()
    assert use(root) == before
    assert 'captain: "Pool", other: ship.Crew' in uses
    assert "ship.Crew(n_sailors=2)._replace(n_sailors=3).n_sailors" in uses
    assert 'captain.borrow(crew="x") + Lazy().borrow() + other.lend() + crew.Pool().n_lent' in uses
    assert "return self.n_sailors" in (root / "fusefs/core/crew.py").read_text()
    assert "`Pool.borrow` gives" in (root / "fusefs/reaper/crew.py").read_text()
    assert "fusefs.reaper.crew:Pool.borrow a method" in (root / "docs/architecture.md").read_text()
    assert compare(tree_of(root, "HEAD"), tree_of(root, None), [names]).differences == []


def test_identifiers_change_in_their_files_alone(root: Path) -> None:
    names = run(root, '[identifiers."fusefs/reaper/*"]\ncrew = "team"\n[identifiers."fusefs/uses.py"]\ncrew = "team"\n')
    assert 'lend(self, *, team: str = "")' in (root / "fusefs/reaper/crew.py").read_text()
    uses = (root / "fusefs/uses.py").read_text()
    assert 'captain.lend(team="x")' in uses
    assert "crew.Crew().n_lent" in uses
    assert compare(tree_of(root, "HEAD"), tree_of(root, None), [names]).differences == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[names]\n"fusefs.reaper.crew:LIMIT" = "Crew"', "has both LIMIT and Crew"),
        ('[names]\n"fusefs.reaper.crew:LIMIT" = "size"', "LIMIT would be size, which means something else there"),
        ('[names]\n"fusefs.reaper.crew:LIMIT" = "len"', "'len' is a builtin"),
        ('[names]\n"fusefs.reaper.crew:None_" = "none"', "has no None_"),
        ('[names]\n"fusefs.reaper.crew:Crew.lend" = "n_lent"', "has both lend and n_lent"),
        ('[modules]\n"fusefs.reaper.crew" = "fusefs.reaper.pace"', "would both be fusefs.reaper.pace"),
        ('[modules]\n"fusefs.reaper.crew" = "fusefs.reaper.ship"', "crew and ship would both be ship"),
        ('[modules]\n"fusefs.reaper.crew" = "fusefs.new.crew"', "the package fusefs.new is new"),
        ('[identifiers."fusefs/uses.py"]\nsize = "lent"', "lent and size would both be lent in one scope"),
    ],
)
def test_a_capture_is_refused_and_nothing_written(root: Path, text: str, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        run(root, text)
    assert reason in "\n".join(refused.value.args)
    assert subprocess.run(["git", "diff", "--stat"], cwd=root, check=True, capture_output=True).stdout == b""


SOURCE = (
    b'"""A."""\nimport os\n\ndef f(one: int, two: int) -> str:\n    """Say."""\n    g(one)\n    return "text" * two\n'
)


@pytest.mark.parametrize(
    ("old", "new", "is_found"),
    [
        (b"g(one)\n", b"g(two)\n", True),
        (b"    g(one)\n", b"", True),
        (b'"text"', b'"texts"', True),
        (b"def f(one: int, two: int)", b"def f(two: int, one: int)", True),
        (b"* two", b"* uno", True),
        (b"import os", b"import sys", True),
        (b"import os\n", b"import os\nimport sys\n", True),
        (b"-> str", b"-> int", True),
        (b"two", b"one", True),
        (b"Say.", b"Tell.", False),
        (b"one", b"uno", False),
        (b"g(one)", b"g(one)  # a comment", False),
    ],
)
def test_the_proof_finds_what_is_no_renaming(tmp_path: Path, old: bytes, new: bytes, is_found: bool) -> None:
    names = map_of(tmp_path, '[identifiers."fusefs/*"]\none = "uno"\n')
    assert old in SOURCE
    found = compare({"fusefs/a.py": SOURCE}, {"fusefs/a.py": SOURCE.replace(old, new)}, [names])
    assert bool(found.differences) == is_found
    assert found.n_docstrings == (old == b"Say.")


def test_files_of_one_side_are_told() -> None:
    found = compare({"fusefs/a.py": b"", "fusefs/b.py": b""}, {"fusefs/b.py": b"", "fusefs/c.py": b""}, [Map()])
    assert found.differences == ["fusefs/c.py: is new", "fusefs/a.py: there is no fusefs/a.py"]


def test_collected_tests_are_the_same_under_the_maps(tmp_path: Path) -> None:
    names = map_of(tmp_path, '[modules]\n"tests.reaper.test_a" = "tests.engine.test_b"\n')
    before = [
        "tests/reaper/test_a.py::test_x[a::b.py tests.reaper.test_a]",
        "tests/unit/test_c.py::test_y",
        "",
        "2 tests collected",
    ]
    after = ["tests/engine/test_b.py::test_x[a::b.py tests.engine.test_b]", "tests/unit/test_c.py::test_y"]
    assert differences(before, after, [names]) == []
    assert differences(before, after[:1], [names]) == ["- tests/unit/test_c.py::test_y"]
