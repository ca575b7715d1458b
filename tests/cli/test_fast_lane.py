"""Plain command lines: they are read as click reads them, and load nothing that is done without."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.cli import reap_fast_lane, rm_fast_lane, swap_fast_lane
from fusefs.cli.group import trashd as commands
from fusefs.cli.plain_line import FastLane
from fusefs.cli.reap_fast_lane import ReapLine
from fusefs.cli.rm_fast_lane import RmLine
from fusefs.cli.swap_fast_lane import PlainSwap
from fusefs.core.record import NOTE_MAX_CHARS
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import Done, environment, swapped, trashd
from tests.unit.test_import_cost import HEAVY

needs_root = pytest.mark.needs("root")
EVERY_OPTION = ("--json", "--no-fsync", "--unlike", "--keep-for", "3d", "--note=a word")
LANES: dict[str, FastLane] = {"swap": swap_fast_lane, "reap": reap_fast_lane, "rm": rm_fast_lane}
DEFAULTS: dict[str, dict[str, Any]] = {
    "swap": PlainSwap._field_defaults,
    "reap": ReapLine._field_defaults,
    "rm": RmLine._field_defaults,
}
VALUES_TYPED = [
    "3d", "0s", "1d12h", "9999w", "99999w", "3", "", "x", "-1d", "3 days", "a note", "n" * (NOTE_MAX_CHARS + 1),
    "a/b", "/a", "\\", "é", "\udcff", "-0", "1.5k", "10b", "0", "64", "65", "007", "4294967295", "--", "-", ".",
]  # fmt: skip
NOT_OPTIONS = ["--", "-", "--no-such", "--js", "--json=1", "-0n", "-rf", "-rx", "-fv=", "--wait=done"]


def click_command(name: str) -> click.Command:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    return command


def words_of(name: str) -> st.SearchStrategy[list[str]]:
    """Words after a command, those that it knows more often."""
    options = [one for param in click_command(name).params if isinstance(param, click.Option) for one in param.opts]
    plain = [*LANES[name].LINE.options]
    valued = [one for one, option in LANES[name].LINE.options.items() if option.reads and one.startswith("--")]
    typed = st.sampled_from(VALUES_TYPED)
    return st.lists(
        st.one_of(
            st.sampled_from(plain),
            st.sampled_from([one for one in options if one != "--help"] + NOT_OPTIONS),
            st.sampled_from(["a", "b/c", "\udcff", "."]),
            typed,
            st.builds("{}={}".format, st.sampled_from(valued), typed),
            st.tuples(st.sampled_from(valued), typed),
        ),
        max_size=7,
    ).map(lambda words: [one for word in words for one in ([word] if isinstance(word, str) else word)])


def check_alike(name: str, words: list[str]) -> None:
    told, usual = LANES[name].LINE.read(words), DEFAULTS[name]
    if told is not None:
        read = click_command(name).make_context(name, [*words]).params
        assert told == {key: read.pop(key) for key in told}
        assert all(value == usual[key] if key in usual else not value for key, value in read.items())


@given(words_of("swap"))
@example(["--keep-for", "3d", "--keep-for", "x", "a"])
@example(["--note", "--json", "a"])
@example(["a", "--", "--json"])
@example(["-", "a"])
def test_what_the_fast_lane_of_swap_reads_click_reads_alike(words: list[str]) -> None:
    check_alike("swap", words)


@given(words_of("reap").filter(lambda words: not any("--volume" in word for word in words)))
@example([])
@example(["--free", "1.5G", "x", "--volume", "/", "--volume=."])
def test_what_the_fast_lane_of_reap_reads_click_reads_alike(words: list[str]) -> None:
    check_alike("reap", words)


@given(words_of("rm").filter(bool))
@example(["-rf", "a"])
@example(["-rfv", "--", "-f"])
@example(["-0"])
def test_what_the_fast_lane_of_rm_reads_click_reads_alike(words: list[str]) -> None:
    check_alike("rm", words)


@given(st.lists(st.sampled_from([*EVERY_OPTION[:3], "--keep-for=3d", "--note=x", "a", "b"]), max_size=6))
def test_the_fast_lane_takes_all_that_it_has_options_for(words: list[str]) -> None:
    assert (swap_fast_lane.LINE.read(words) is None) == (not {"a", "b"} & {*words})


@pytest.mark.parametrize("name", LANES)
def test_options_of_the_fast_lane_are_clicks(name: str) -> None:
    by_word = {
        one: param for param in click_command(name).params if isinstance(param, click.Option) for one in param.opts
    }
    for word, option in LANES[name].LINE.options.items():
        param = by_word[word]
        assert (option.name, option.reads is None, option.many) == (param.name, param.is_flag, param.multiple)


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
    victim, spaced = make_tree(volume / "victim", {"file": "content"}), make_tree(volume / "a mount\\'s", {})
    trashd("swap", victim)
    bare = list_imports(trashd("--version", PYTHONPROFILEIMPORTTIME="1"))
    before_ours = bare[: bare.index("fusefs.cli")]
    with bind_mount(spaced, spaced):  # anybody's mount anywhere
        imported = list_imports(trashd("swap", *EVERY_OPTION, victim, PYTHONPROFILEIMPORTTIME="1"))
    assert HEAVY & {*imported} - {*before_ours} == set()


@needs_root
@pytest.mark.parametrize(
    "words", [(), ("--json",), ("--all", "--now"), ("--now", "--threads=1", "--with-stores", "ID")]
)
def test_a_reap_loads_nothing_heavy(volume: Path, words: tuple[str, ...]) -> None:
    made = swapped(make_tree(volume / "victim", {"a": {"file": "content"}}))["id"]
    before_ours = list_imports(trashd("--version", PYTHONPROFILEIMPORTTIME="1"))
    words = tuple(made if word == "ID" else word for word in words)
    done = trashd("reap", "--volume", volume, *words, PYTHONPROFILEIMPORTTIME="1")
    imported = [line.rpartition("|")[2].strip() for line in done.err.splitlines()]
    assert HEAVY & {*imported} - {*before_ours[: before_ours.index("fusefs.cli")]} == set()
    assert ("fusefs.reaper.remove_slice" in imported) == ("--now" in words)


@needs_root
@pytest.mark.parametrize("words", [EVERY_OPTION, ("--json",), ("--note", "é")])
def test_both_lanes_of_a_swap_tell_the_same(volume: Path, words: tuple[str, ...]) -> None:
    victim, missing = make_tree(volume / "victim", {"file": "content"}), volume / "missing"
    quick = trashd("swap", *words, victim, missing)
    slow = trashd(
        "swap", *words, "--keep-for=24 hours" if "--keep-for" not in words else "--keep-for=3 days", victim, missing
    )
    told = [re.sub(r"\d{8}T\S+-[0-9a-f]{12}", "ID", done.out + done.err) for done in (quick, slow)]
    assert (quick.code, told[0]) == (slow.code, told[1])


BY_CLICK = "from fusefs.cli import main; main._fast_lane = lambda _arguments: None; main.main()"
WRONG_LINES = [
    ("reap", "--now"), ("reap", "--pinned", "--volume", "{}"), ("reap", "none-such", "--volume={}"),
    ("reap", "--volume", "{}/none"), ("reap", "--all", "x"), ("reap", "--free=1G", "--all"), ("reap", "--volume={}"),
    ("rm", "{}/none"), ("rm", "-v"), ("rm", "-f", "{}/none"), ("rm", "--now", "{}/none", "{}/other"),
]  # fmt: skip


@needs_root
@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("line", WRONG_LINES)
def test_both_lanes_say_the_same_of_what_is_wrong(
    volume: Path, line: tuple[str, ...], as_json: tuple[str, ...]
) -> None:
    command, *words = [word.format(volume) for word in line]
    quick = trashd(command, *words, *as_json)
    slow = subprocess.run(
        [sys.executable, "-c", BY_CLICK, command, *words, *as_json],
        capture_output=True,
        env=environment({}),
        check=False,
    )
    assert (quick.code, quick.out, quick.err) == (slow.returncode, slow.stdout.decode(), slow.stderr.decode())
