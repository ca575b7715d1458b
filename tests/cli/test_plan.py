"""trashd plan: says what it would do until it is told to; a wrong rule is told with its key, and nothing is done."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.cli.main import run
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import CommandResult, trashd

ALICE = 12001
pytestmark = pytest.mark.needs("root")


@pytest.fixture
def volume() -> Iterator[Path]:
    """Two old files and a new one in scratch."""
    with tmpfs_volume() as path:
        path.chmod(0o755)
        (path / "scratch").mkdir()
        for name, time_s in (("old-1", 10**9), ("old-2", 1_000_100_000), ("new", None)):
            (path / "scratch" / name).write_bytes(b"content")
            if time_s is not None:
                os.utime(path / "scratch" / name, (time_s, time_s))
        yield path


def plan(volume: Path, text: str, *options: str, name: str = "plan.toml") -> CommandResult:
    """What `trashd plan` says of a file with this text."""
    file = volume / name
    file.write_text(text, encoding="utf-8")
    file.chmod(0o644)
    return trashd("plan", *options, file)


def rule(volume: Path, *lines: str) -> str:
    return "\n".join(["[[rule]]", f'directory = "{volume}/scratch"', 'older = "30d"', *lines, ""])


def left(volume: Path) -> set[str]:
    return {path.name for path in (volume / "scratch").iterdir()}


def test_it_says_what_it_would_do_and_touches_nothing(volume: Path) -> None:
    done = plan(volume, rule(volume), "show")
    assert done == CommandResult(
        0,
        f"{volume}/plan.toml: rule[1]: {volume}/scratch: 2 matches (14 B) would be trashed\n"
        "  largest        7 B  2001-09-10  old-2\n"
        "                 7 B  2001-09-09  old-1\n"
        "  oldest         7 B  2001-09-09  old-1\n"
        "                 7 B  2001-09-10  old-2\n"
        "2 matches (14 B) in 1 directory would be processed; "
        f"to carry this out, run: trashd plan apply {volume}/plan.toml\n",
        "",
    )
    assert left(volume) == {"old-1", "old-2", "new"}
    assert not (volume / ".trashd").exists()


def test_it_does_it_and_says_how_to_take_it_back(volume: Path) -> None:
    done = plan(volume, rule(volume), "apply")
    assert (done.code, done.err) == (0, "")
    assert left(volume) == {"new"}
    (undo,) = [line.split()[1:] for line in done.out.splitlines() if line.startswith("  undo")]
    assert undo[:2] == ["trashd", "restore"]
    assert trashd("restore", "--volume", volume, undo[-1]).code == 0
    assert left(volume) == {"old-1", "old-2", "new"}


def test_error_in_any_file_is_told_with_its_key_and_nothing_is_done(volume: Path) -> None:
    right = volume / "right.toml"
    right.write_text(rule(volume), encoding="utf-8")
    file = volume / "wrong.toml"
    file.write_text('[[rule]]\ndirectory = "/scratch"\nolder = "30x"\n', encoding="utf-8")
    done = trashd("plan", "apply", right, file)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"{file}: rule[1].older: '30x': unknown unit 'x'")
    assert done.err.endswith("trashd: nothing was done\n")
    assert left(volume) == {"old-1", "old-2", "new"}


def test_check_of_what_is_right_says_so(volume: Path) -> None:
    assert plan(volume, rule(volume), "check") == CommandResult(0, "1 rule, no problems\n", "")


@pytest.mark.parametrize(("runs", "code"), [(False, 0), (True, 2)])
def test_what_somebody_else_wrote_is_looked_at_but_not_done(volume: Path, runs: bool, code: int) -> None:
    file = volume / "plan.toml"
    file.write_text(rule(volume), encoding="utf-8")
    os.chown(file, ALICE, ALICE)
    done = trashd("plan", "apply" if runs else "show", file)
    assert done.code == code
    assert (f"it belongs to uid {ALICE}" in done.err) == runs
    assert left(volume) == {"old-1", "old-2", "new"}


def test_json_tells_each_directory(volume: Path) -> None:
    lists = f'purgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    text = rule(volume, lists) + rule(volume).replace("scratch", "none*").replace("older", "newer")
    done, missing, listed = plan(volume, text, "show", "--json").objects()
    assert (done["rule"], done["action"], done["dry_run"]) == (f"{volume}/plan.toml: rule[1]", "trash", True)
    assert (done["directory"], done["sums"]["n_done"], done["oldest"][0]["path"]) == (f"{volume}/scratch", 2, "old-1")
    assert (missing["directory"], missing["error"]) == (f"{volume}/none*", None)
    assert listed == {"lists": f"{volume}/lists", "n_users": 0, "n_entries": 0, "is_whole": True}


def test_rest_beyond_max_delete_is_told_by_the_exit_code(volume: Path) -> None:
    done = plan(volume, rule(volume, 'action = "delete"', "max_delete = 1"), "apply")
    assert done.code == 13
    assert "there are more matches" in done.out
    assert len(left(volume)) == 2


def test_a_list_that_stays_is_told_by_the_exit_code_when_all_is_done(volume: Path) -> None:
    (volume / "lists").mkdir()
    (volume / "lists/gone.list").touch()
    os.chown(volume / "lists/gone.list", ALICE, ALICE)
    lists = f'purgelist = {{ directory = "{volume}/lists", ahead = "7d" }}'
    done = plan(volume, rule(volume, 'action = "delete"', lists), "apply")
    assert (done.code, left(volume)) == (13, {"new"})
    assert f"{volume}/lists/gone.list could not be replaced: not a purge list made by trashd" in done.err
    assert "remove it, or name another directory" in done.err


def test_a_mark_that_does_not_count_is_told_by_the_exit_code(volume: Path) -> None:
    (volume / "scratch/.trashd-keep").touch()
    os.chown(volume / "scratch/.trashd-keep", ALICE, ALICE)
    done = plan(volume, rule(volume, 'action = "delete"'), "apply")
    assert (done.code, left(volume)) == (13, {"new", ".trashd-keep"})
    assert "  .: contains a .trashd-keep of a user who is neither its owner nor root\n" in done.out


def test_system_s_rules_are_those_that_are_meant_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fusefs.linux.config_files.SYSTEM_DIR", bytes(tmp_path))
    assert run(["plan", "apply"]) == 0
    assert capsys.readouterr().err == f"{tmp_path}/plan.d: no rules found\n"
    (tmp_path / "plan.d").mkdir()
    for name in ("b.toml", "a.toml", ".hidden.toml", "other.txt"):
        (tmp_path / "plan.d" / name).write_text("[[rule]]\n", encoding="utf-8")
    assert run(["plan", "check"]) == 2
    output_lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[0] for line in output_lines if "no directory" in line] == [
        f"{tmp_path}/plan.d/a.toml: rule[1]", f"{tmp_path}/plan.d/b.toml: rule[1]",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_plan_without_a_command_is_shown(volume: Path, options: tuple[str, ...]) -> None:
    text = rule(volume).replace("scratch", "empty")
    (volume / "empty").mkdir()
    without, shown = plan(volume, text, *options), plan(volume, text, "show", *options)
    assert (without.code, without.out) == (shown.code, shown.out)


@pytest.mark.parametrize("command", ["show", "apply"])
def test_a_removed_key_is_a_warning_and_the_rule_is_carried_out(volume: Path, command: str) -> None:
    done = plan(volume, rule(volume, "copy = true"), command)
    assert (done.code, "2 matches (14 B) in 1 directory" in done.out) == (0, True)
    assert "trashd: warning: " in done.err
    assert "copy: this key was removed and has no effect" in done.err


def test_a_removed_key_is_told_by_a_check_that_ends_well(volume: Path) -> None:
    done = plan(volume, rule(volume, "copy = true"), "check")
    assert "copy: this key was removed and has no effect" in done.out
    assert (done.code, "no problems" in done.out) == (0, False)
