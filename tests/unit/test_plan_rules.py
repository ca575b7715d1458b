"""A plan's rules: what is typed is what is meant; what could take more than was meant is told with its line."""

import re
import time

import pytest

from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.plan_rules import (
    DeleteAction,
    MoveAction,
    PlanContext,
    PurgeNotice,
    Rule,
    RuleAge,
    TrashAction,
    read_plan,
)
from fusefs.core.selection import KINDS, Selection, SizeBound, TimeBound
from fusefs.core.toml_reader import Source

DAY_NS = 86_400 * 10**9
NOW_NS = 1_800_000_000 * 10**9


def uid_of(text: str) -> int:
    """anna is 1000."""
    if text == "anna":
        return 1000
    if not text.isdecimal():
        raise ValueError(f"there is no user {text}")
    return int(text)


WORLD = PlanContext(NOW_NS, time.mktime, uid_of, uid_of)


def read(*texts: str) -> tuple[Rule, ...]:
    """The rules of files f1, f2…"""
    return read_plan([Source(f"f{number}", text) for number, text in enumerate(texts, 1)], WORLD)


def rule(text: str) -> Rule:
    """The rule with these keys, for /scratch."""
    (only,) = read(f'[[rule]]\ndirectory = "/scratch"\n{text}\n')
    return only


def problems(*texts: str) -> list[ConfigProblem]:
    """What is wrong with them."""
    with pytest.raises(BadConfig) as caught:
        read(*texts)
    return list(caught.value.problems)


def problem(text: str) -> ConfigProblem:
    """The one thing that is wrong with a rule that has these keys, which begin in line 3."""
    (only,) = problems(f'[[rule]]\ndirectory = "/scratch"\n{text}\n')
    return only


def test_nothing_typed_is_no_rule() -> None:
    assert read() == read("") == read("# a comment\n") == ()


def test_every_key_of_a_selection_is_understood() -> None:
    read_rule = rule("""
        name = "*.log"
        iname = "A*"
        path = "sub/*"
        regex = ".*[0-9]"
        exclude = ["*.keep", "a/b"]
        type = ["f", "l"]
        size = ["+1K", "-1M"]
        older = "30d"
        newer = "60d"
        by = "atime"
        user = "anna"
        group = 100
        depth = 3
        max_delete = 10
    """)
    assert read_rule.selection == Selection(
        names=("*.log",),
        inames=("A*",),
        paths=("sub/*",),
        regexes=(".*[0-9]",),
        excludes=("*.keep", "a/b"),
        types=frozenset("fl"),
        sizes=(SizeBound(1025), SizeBound(0, (1 << 20) - 1)),
        times=(
            TimeBound("atime", before_ns=NOW_NS - 30 * DAY_NS), TimeBound("atime", after_ns=NOW_NS - 60 * DAY_NS),
        ),
        uids=(1000,),
        gids=(100,),
        max_depth=3,
    )  # fmt: skip
    assert (read_rule.action, read_rule.is_unit, read_rule.most) == (TrashAction(), False, 10)


@pytest.mark.parametrize(
    ("text", "act"),
    [
        ('keep_for = "7d"', TrashAction(7 * 86_400)),
        ('action = "delete"', DeleteAction()),
        ('action = "move"\nmove_to = "/old"', MoveAction(b"/old")),
        (
            'action = "move"\nmove_to = "/old"\nif_exists = "number"',
            MoveAction(b"/old", if_exists="number"),
        ),
    ],
)
def test_every_action_is_understood(text: str, act: TrashAction | DeleteAction | MoveAction) -> None:
    assert rule(f'name = "*"\n{text}').action == act


def test_unit_is_chosen_by_its_own_name_whatever_it_is() -> None:
    unit = rule('unit = "top"\nolder = "90d"\nby = "ctime"')
    assert (unit.is_unit, unit.age) == (True, RuleAge(("ctime",), NOW_NS - 90 * DAY_NS))
    assert unit.selection == Selection(types=frozenset(KINDS), max_depth=1)


def test_age_by_several_times_is_that_of_the_latest() -> None:
    old = rule('older = "30d"\nby = ["mtime", "atime"]')
    before_ns = NOW_NS - 30 * DAY_NS
    assert old.age == RuleAge(("mtime", "atime"), before_ns)
    assert old.selection.times == tuple(TimeBound(field, before_ns=before_ns) for field in ("mtime", "atime"))


def test_list_tells_of_what_will_be_as_old() -> None:
    listed = rule('older = "30d"\npurgelist = { directory = "/lists", ahead = "7d" }')
    assert listed.purge == PurgeNotice(b"/lists", 7 * 86_400)
    assert listed.upcoming_selection().times == (TimeBound("mtime", before_ns=NOW_NS - 23 * DAY_NS),)


def test_rules_come_in_the_order_of_the_files() -> None:
    first, second = '[[rule]]\ndirectory = "/a"\nname = "*"\n', '\n[[rule]]\ndirectory = "/b*"\nname = "*"\n'
    assert [(str(one.place), one.directory) for one in read(first + second, second)] == [
        ("f1: rule[1]", b"/a"), ("f1: rule[2]", b"/b*"), ("f2: rule[1]", b"/b*"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ('older = "30x"', "older", ".*unknown unit 'x'"),
        ("older = 30", "older", "expected a string, got 30"),
        ('older = "/etc/passwd"', "older", "not the time of a file"),
        ('name = ""', "name", "expected a string"),
        ('name = ["a", "b"]', "name", r'expected a string, got \["a", "b"\]'),
        ('name = "a/b"', "name", ".*contains a slash"),
        ('name = "*"\nexclude = ["/scratch/a"]', "exclude", ".*relative"),
        ('size = "-0"', "size", ".*nothing is smaller"),
        ('user = "nobody-has-that"', "user", "there is no user nobody-has-that"),
        ('name = "*"\nby = "atime"', "by", "by needs older"),
        (
            'older = "3d"\nby = ["atime", "xtime"]',
            "by",
            r'expected a time, or a list of times, got \["atime", "xtime"\]',
        ),
        ('older = "3d"\nby = []', "by", r"expected a time, or a list of times, got \[\]"),
        ('name = "*"\nmax_delete = 0', "max_delete", "expected a number above 0, got 0"),
        ('name = "*"\naction = "burn"', "action", 'expected one of .*, got "burn"'),
        ('name = "*"\nretension = "7d"', "retension", "unknown key"),
        ('name = "*"\ntype = "d"', "type", "would take directories"),
        ('name = "*"\nkeep_for = "7d"\naction = "delete"', "keep_for", "keep_for can't be combined with action"),
        ('name = "*"\nmove_to = "/old"', "move_to", "move_to needs action"),
        ('name = "*"\naction = "move"', "action", "needs move_to"),
        ('unit = "top"\nname = "*"', "unit", "needs older"),
        ('unit = "top"\nolder = "9d"\nsize = "+1M"', "size", "size can't be combined with unit"),
        (
            'name = "*"\npurgelist = { directory = "/l", ahead = "7d" }',
            "purgelist.directory",
            "purgelist needs older",
        ),
        (
            'older = "2026-01-01"\npurgelist = { directory = "/l", ahead = "7d" }',
            "purgelist.directory",
            "with a duration and not a date",
        ),
        (
            'older = "7d"\npurgelist = { directory = "/l", ahead = "7d" }',
            "purgelist.directory",
            "ahead is not shorter than older",
        ),
        ('older = "7d"\npurgelist = { directory = "/l" }', "purgelist.directory", "purgelist needs ahead"),
    ],
)
def test_what_can_not_be_meant_is_told_with_its_key(text: str, key: str, what: str) -> None:
    found = problem(text)
    assert (found.file, found.key) == ("f1", f"rule[1].{key}")
    assert re.search(what, found.what)


@pytest.mark.parametrize("text", ["", 'type = "f"', "depth = 1", "empty = false", 'exclude = ["*.c"]'])
def test_rule_that_narrows_nothing_is_refused(text: str) -> None:
    found = problem(text)
    assert found.key == "rule[1]"
    assert "no condition that selects files" in found.what


@pytest.mark.parametrize("directory", ["scratch", "/", "/a/../b", "", "/a/[z-a]"])
def test_directory_is_absolute_and_below_the_root(directory: str) -> None:
    (found,) = problems(f'[[rule]]\nname = "*"\ndirectory = "{directory}"\n')
    assert (found.key, found.what.startswith("expected an absolute path")) == ("rule[1].directory", True)


def test_every_problem_of_every_file_is_told() -> None:
    wrong = '[[rule]]\ndirectory = "/a"\nolder = "x"\n[[rule]]\nname = "*"\n'
    assert [(one.file, one.key) for one in problems(wrong, "[[rule]\n", wrong)] == [
        ("f1", "rule[1].older"), ("f1", "rule[2]"), ("f2", ""), ("f3", "rule[1].older"), ("f3", "rule[2]"),
    ]  # fmt: skip


def test_rule_without_a_directory_is_told_beside_a_purge_list() -> None:
    listed = '[[rule]]\ndirectory = "/a"\nolder = "9d"\npurgelist = { directory = "/b", ahead = "1d" }\n'
    (found,) = problems(f'[[rule]]\ndirectry = "/c"\nname = "*"\n{listed}')
    assert (found.key, found.what) == ("rule[1].directry", "unknown key")


def test_every_problem_of_one_rule_is_told_at_once() -> None:
    text = 'keep_for = "x"\nuser = "nobody-has-this"\ndepth = 0\nunit = "foo"\nname = "*"\nsize = "-0"\nnmae = "*"'
    found = [one.key.removeprefix("rule[1].") for one in problems(f'[[rule]]\ndirectory = "/a"\n{text}')]
    assert sorted(found) == ["depth", "keep_for", "nmae", "size", "unit", "user"]


@pytest.mark.parametrize(
    "text",
    [
        "directory = 1\nname = '*'",
        "directory = '/a'\nname = 1",
        "directory = '/a'\nnmae = '*'",
        "dirctory = '/a'\nname = '*'",
        "directory = '/a'\nname = '*'\nolder = 1\nby = 'atime'",
        "directory = '/a'\nname = '*'\nodler = '1d'\nunit = 'top'",
        "directory = '/a'\nolder = 1\nunit = 'top'",
        "directory = '/a'\nolder = '1d'\nunit = 1\ntype = 'd'",
        "directory = '/a'\ntype = 'd'\nempty = 1",
        "directory = '/a'\nname = '*'\naction = 'mvoe'\nmove_to = '/b'",
        "directory = '/a'\nname = '*'\naction = 'move'\nmove_to = 1",
        "directory = '/a'\nname = '*'\nactoin = 'move'\nmove_to = '/b'",
        "directory = '/a'\nolder = '9d'\npurgelist = { directory = '/b', ahead = 1 }",
        "directory = '/a'\nolder = '9d'\npurgelist = { directory = '/b', ahaed = '1d' }",
        "directory = '/a'\nolder = 1\npurgelist = { directory = '/b', ahead = '1d' }",
        "directory = '/a'\nolder = '9d'\npurgelist = 1",
    ],
)
def test_one_mistake_is_one_problem(text: str) -> None:
    assert len(problems(f"[[rule]]\n{text}")) == 1


@pytest.mark.parametrize("text", ['directory = "/a"', "[rule]", "rule = 1", "[rules]", "[[rule.what]]"])
def test_what_is_no_list_of_rules_is_told(text: str) -> None:
    assert problems(text)


@pytest.mark.parametrize("lists", ["/scratch", "/scratch/lists", "/home/anna/tmp/a/b"])
def test_purge_lists_lie_nowhere_that_a_rule_goes(lists: str) -> None:
    listed = f'[[rule]]\ndirectory = "/scratch"\nolder = "30d"\npurgelist = {{ directory = "{lists}", ahead = "7d" }}\n'
    (found,) = problems(listed, '[[rule]]\ndirectory = "/home/*/tmp"\nname = "*"\n')
    assert (found.file, found.key) == ("f1", "rule[1]")
    assert re.search(r"its purgelist is in a directory that the rule at f[12]: rule\[1\] sweeps", found.what)


@pytest.mark.parametrize("lists", ["/srv", "/srv/.lists", "/srv2/lists", "/lists/srv"])
def test_purge_lists_lie_anywhere_else(lists: str) -> None:
    assert read(
        f'[[rule]]\ndirectory = "/srv/*"\nolder = "30d"\npurgelist = {{ directory = "{lists}", ahead = "7d" }}\n'
    )


def test_what_is_no_toml_is_told_with_the_page_of_plans() -> None:
    (found,) = problems("[[rule]\n")
    assert found.fix == "see trashd-plan(5)"


@pytest.mark.parametrize("key", ["copy", "flat"])
def test_a_removed_key_is_a_warning_and_changes_nothing(key: str) -> None:
    warnings: list[ConfigProblem] = []
    move = 'name = "*"\naction = "move"\nmove_to = "/old"\n'
    text = f'[[rule]]\ndirectory = "/scratch"\n{move}{key} = true\n'
    (with_key,) = read_plan([Source("f1", text)], WORLD._replace(warn=warnings.append))
    assert with_key == rule(move)
    (warning,) = warnings
    assert warning.key == f"rule[1].{key}"
    assert (warning.is_warning, warning.what) == (True, "this key was removed and has no effect")


def test_a_warning_is_told_with_the_problems_of_a_file() -> None:
    found_problems = problems('[[rule]]\ndirectory = "/scratch"\nname = "a/b"\ncopy = 7\n')
    assert sorted(one.is_warning for one in found_problems) == [False, True]
