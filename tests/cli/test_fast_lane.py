"""A plain `trashd swap`: its command line is read as click reads it, and it loads nothing that it does without."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.cli.swap import command
from fusefs.cli.swap_fast_lane import FLAGS, VALUES, PlainSwap, plain_swap
from fusefs.core.record import NOTE_MAX_CHARS
from tests.support.make_trees import make_tree
from tests.support.trashd_command import Done, trashd
from tests.unit.test_import_cost import HEAVY

needs_root = pytest.mark.needs("root")
EVERY_OPTION = ("--json", "--no-fsync", "--unlike", "--keep-for", "3d", "--note=a word")
OTHER_WORDS = [name for one in command.params if isinstance(one, click.Option) for name in one.opts if name != "--help"]
VALUES_TYPED = [
    "3d",
    "0s",
    "1d12h",
    "9999w",
    "99999w",
    "3",
    "",
    "x",
    "-1d",
    "3 days",
    "a note",
    "n" * (NOTE_MAX_CHARS + 1),
]
WORDS = st.one_of(
    st.sampled_from([*FLAGS, *VALUES, *OTHER_WORDS, "--", "-", "--no-such", "--js", "--json=1", "-0n", "--wait=done"]),
    st.sampled_from(VALUES_TYPED),
    st.builds("{}={}".format, st.sampled_from([*VALUES]), st.sampled_from(VALUES_TYPED)),
    st.sampled_from(["a", "b/c", "é", "\udcff", "."]),
)


def read_by_click(words: list[str]) -> dict[str, Any]:
    """What click reads of it. Raises  click.UsageError"""
    return command.make_context("swap", list(words)).params


@given(st.lists(WORDS, max_size=6))
@example(["--keep-for", "3d", "--keep-for", "x", "a"])
@example(["--note", "--json", "a"])
@example(["a", "--", "--json"])
def test_what_the_fast_lane_reads_click_reads_alike(words: list[str]) -> None:
    plain = plain_swap(["swap", *words])
    if plain is not None:
        read = read_by_click(words)
        assert plain == PlainSwap(**{name: read.pop(name) for name in PlainSwap._fields})
        assert not any(read.values())


@given(st.lists(st.sampled_from([*EVERY_OPTION[:3], "--keep-for=3d", "--note=x", "a", "b"]), max_size=6))
def test_the_fast_lane_takes_all_that_it_has_options_for(words: list[str]) -> None:
    assert (plain_swap(["swap", *words]) is None) == (not {"a", "b"} & {*words})


def test_options_of_the_fast_lane_are_clicks() -> None:
    options = {name: one for one in command.params if isinstance(one, click.Option) for name in one.opts}
    assert {name for name in FLAGS if options[name].is_flag} == {*FLAGS}
    assert not any(options[name].is_flag or options[name].multiple for name in VALUES)


def list_imports(done: Done) -> list[str]:
    assert done.code == 0
    return [line.rpartition("|")[2].strip() for line in done.err.splitlines()]


@needs_root
def test_a_plain_swap_imports_nothing_of_ours_once_it_is_under_way(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    imported = list_imports(trashd("swap", victim, PYTHONPROFILEIMPORTTIME="1"))
    assert [name for name in imported if name.startswith("fusefs.")][-1] == "fusefs.cli.swap_fast_lane"


@needs_root
def test_a_swap_with_options_imports_nothing_heavy(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    trashd("swap", victim)
    bare = list_imports(trashd("--version", PYTHONPROFILEIMPORTTIME="1"))
    before_ours = bare[: bare.index("fusefs.cli")]
    imported = list_imports(trashd("swap", *EVERY_OPTION, victim, PYTHONPROFILEIMPORTTIME="1"))
    assert HEAVY & {*imported} - {*before_ours} == set()


@needs_root
@pytest.mark.parametrize("words", [EVERY_OPTION, ("--json",), ("--note", "é")])
def test_both_lanes_tell_the_same(volume: Path, words: tuple[str, ...]) -> None:
    victim, missing = make_tree(volume / "victim", {"file": "content"}), volume / "missing"
    quick = trashd("swap", *words, victim, missing)
    slow = trashd(
        "swap", *words, "--keep-for=24 hours" if "--keep-for" not in words else "--keep-for=3 days", victim, missing
    )
    told = [re.sub(r"\d{8}T\S+-[0-9a-f]{12}", "ID", done.out + done.err) for done in (quick, slow)]
    assert (quick.code, told[0]) == (slow.code, told[1])
