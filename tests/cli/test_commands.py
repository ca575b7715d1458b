"""Every command: exit codes, output for people and programs, errors with a hint; closed streams, broken stores."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from fusefs.cli import main
from fusefs.cli.group import trashd as group
from fusefs.core.errors import NotFound, UsageError
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags, snapshot
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent, entries, init
from tests.support.trash_without_walk import gather
from tests.support.trashd_command import TRASHD, done_well, environment, swapped, trashd
from tests.support.user_homes import ALICE, homes, trashd_as

pytestmark = pytest.mark.needs("root")


NOBODY = 65_534


def listed(volume: Path) -> list[dict[str, Any]]:
    return done_well("list", "--json", "--volume", volume).objects()


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": "content", "below": {"deep": "more"}})


def test_swap_prints_the_command_that_takes_it_back(volume: Path) -> None:
    victim = make_victim(volume)
    before = snapshot(victim)
    (undo,) = [line for line in done_well("swap", victim).out.splitlines() if line.startswith("  undo  trashd ")]
    done_well(*undo.split()[2:], "--volume", str(volume))
    assert snapshot(victim) == before


def test_the_restore_command_names_a_store_that_is_not_at_the_mounts_root(volume: Path) -> None:
    lower = volume / "lower store"
    lower.mkdir()
    with tmpfs_volume() as other:
        (other / "given dir").mkdir()
        done_well("init", other / "given dir")
        victim = make_victim(other / "given dir")
        command = swapped(victim)["restore"]
        subprocess.run(["sh", "-c", command.replace("trashd", TRASHD, 1)], check=True, stdout=subprocess.DEVNULL)
        assert (victim / "file").read_text() == "content"
        assert_silent(other / "given dir")


def test_list_shows_origin_note_and_time_left(volume: Path) -> None:
    victim = make_victim(volume)
    swapped(victim, "--note", "a note", "--keep-for", "3d")
    (_head, row) = done_well("list", "--volume", volume).out.splitlines()
    assert "  2d23h   unknown  root   restorable  " in row
    assert row.endswith(f"{victim}  # a note")


@pytest.mark.needs("loop")
def test_what_cannot_be_reaped_now_is_13_and_stays_listed_until_it_can() -> None:
    with loop_volume("ext4") as disk:
        done_well("init", disk)
        victim = make_victim(disk)
        set_flags(victim / "file", IMMUTABLE)
        done = trashd("swap", "--now", victim)
        assert done.code == 13
        assert "unlink tree/file: Operation not permitted" in done.out
        (entry,) = listed(disk)
        assert entry["state"] == "quarantine"
        subprocess.run(["chattr", "-i", f"{entry['path']}/tree/file"], check=True)
        done_well("reap", "--now", "--volume", disk, entry["id"])
        assert listed(disk) == []
        assert_silent(disk)


def test_names_from_standard_input_may_hold_anything_but_nul(volume: Path) -> None:
    victim = os.fsencode(volume) + b"/new\nline \xff -0"
    os.mkdir(victim)
    done_well("swap", "-0", stdin=victim)
    assert [os.fsencode(entry["origin"]) for entry in listed(volume)] == [victim]


def test_a_volume_that_became_read_only_is_listed_all_the_same() -> None:
    with tmpfs_volume() as volume:
        done_well("init", volume)
        victim = make_victim(volume)
        identifier = swapped(victim)["id"]
        subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
        assert [entry["origin"] for entry in listed(volume)] == [str(victim)]
        assert_silent(volume)
        for words in ("restore", "reap --now"):
            done = trashd(*words.split(), "--volume", volume, identifier)
            assert (done.code, "mounted read-only" in done.err) == (11, True)
        subprocess.run(["mount", "-o", "remount,rw", volume], check=True)
        done_well("restore", "--volume", volume, identifier)
        assert_silent(volume)


def test_restore_of_a_sweep_says_what_has_its_name_taken_and_brings_it_later(volume: Path) -> None:
    victim = make_victim(volume)
    orphan = gather(victim, ["file", "below/deep"]).orphan
    assert orphan is not None
    assert f"{victim} (swept)" in done_well("list", "--volume", volume).out
    (victim / "file").write_text("new")
    done = trashd("restore", "--volume", volume, orphan)
    assert done.code == 13
    assert done.out.splitlines() == [
        f"{victim}: restored, except 1 entry",
        "  file: File exists",
        f"  the rest is still in the orphan {orphan}; restore the orphan again, or elsewhere with --to PATH",
    ]
    assert (victim / "below/deep").read_text() == "more"
    done = trashd("restore", "--json", "--volume", volume, orphan)
    assert done.code == 13
    assert json.loads(done.out)["left"] == [{"name": "file", "errno": 17, "call": "renameat2"}]
    (victim / "file").unlink()
    assert json.loads(done_well("restore", "--json", "--volume", volume, orphan).out)["n_left"] == 0
    assert (victim / "file").read_text() == "content"


def test_reap_by_id_before_its_time_needs_now(volume: Path) -> None:
    swap_result = swapped(make_victim(volume))
    assert trashd("reap", "--volume", volume, swap_result["id"]).code == 13
    done_well("reap", "--now", "--volume", volume, swap_result["id"])
    assert listed(volume) == []


def test_reap_all_before_their_time_needs_now(volume: Path) -> None:
    swapped(make_victim(volume))
    done_well("reap", "--all", "--volume", volume)
    assert len(listed(volume)) == 1
    done_well("reap", "--all", "--now", "--volume", volume)
    assert listed(volume) == []


def test_reap_all_of_root_leaves_the_orphans_of_users(volume: Path) -> None:
    home = volume / "home"
    home.mkdir()
    for directory in (home, make_victim(home)):
        os.chown(directory, NOBODY, NOBODY)
    swapped(home / "victim", "--for-owner")
    done_well("reap", "--all", "--now", "--volume", volume)
    assert [entry["uid"] for entry in listed(volume)] == [NOBODY]


def test_init_again_changes_nothing(volume: Path) -> None:
    before = snapshot(volume, with_times=True)
    assert "exists" in done_well("init", volume).out
    assert snapshot(volume, with_times=True) == before


def test_the_bar_is_for_terminals_only(volume: Path) -> None:
    swap_result = swapped(make_victim(volume))
    done = done_well("reap", "--now", "--volume", volume, swap_result["id"])
    assert done.err == ""
    assert "\x1b" not in done.out


USAGE = 2


@pytest.mark.quick("swap")
@pytest.mark.parametrize("by", [(), ("--keep", "none*")], ids=["plain", "click"])
def test_it_is_what_restore_takes(volume: Path, by: tuple[str, ...]) -> None:
    victim = make_tree(volume / "job", {"f": "1", "none": ""})
    done = done_well("swap", "--print-id", *by, victim)
    assert (done.out, done.err) == (entries(volume)[0].id + "\n", "")
    done_well("restore", done.out.strip())
    assert (victim / "f").read_text() == "1"


def test_it_is_a_line_for_each_that_was_swapped(volume: Path) -> None:
    victims = [make_tree(volume / name, {"f": ""}) for name in "ab"]
    done = trashd("swap", "--print-id", victims[0], volume / "missing", victims[1])
    assert done.out.split() == [entry.id for entry in entries(volume)]
    assert "missing" in done.err
    assert done.code == 13


@pytest.mark.parametrize("other", ["--json", "--dry-run", "--now", "--wait"])
def test_nothing_else_may_print_beside_it(volume: Path, other: str) -> None:
    victim = make_tree(volume / "job", {"f": "1"})
    done = trashd("swap", "--print-id", other, victim)
    assert (done.code, done.out, entries(volume)) == (USAGE, "", [])


def test_what_is_told_to_a_closed_standard_error_is_in_no_file(volume: Path) -> None:
    victim = make_victim(volume)
    refused = f"exec {TRASHD} rm missing {victim} 2>&-"
    assert subprocess.run(["sh", "-c", refused], cwd=volume, stdout=subprocess.DEVNULL, check=False).returncode == 13
    (found,) = done_well("list", "--json", "--volume", volume).objects()
    assert found["origin"] == str(victim)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), NotFound("x"), OSError(errno.EIO, "x", "x")])
def test_what_was_printed_is_out_however_it_ends(monkeypatch: pytest.MonkeyPatch, end: BaseException) -> None:
    def prints(_arguments: list[str]) -> int:
        print("done so far")
        raise end

    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr(main, "_run_words", prints)
    assert main.run([]) != 0
    assert out.getvalue() == b"done so far\n"


def test_a_closed_pipe_ends_it_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([TRASHD, "--help"], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


def test_where_a_user_may_not_write_is_told_as_he_knows_it(volume: Path) -> None:
    home = volume / "home"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", TRASHD, "pause"]
    variables = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 4
    assert f"{home}: permission denied" in done.stderr


@pytest.mark.parametrize("words", ["sweep . --name x --print"])
def test_who_is_in_a_directory_that_was_removed_is_told_so(volume: Path, words: str) -> None:
    (volume / "here").mkdir()
    shell = f'cd "{volume}/here" && rmdir "{volume}/here" && exec {TRASHD} {words}'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, "the working directory: not found" in done.stderr) == (5, True)


@pytest.mark.parametrize("words", ["restore {id}", "rm {victim}", "sweep {victim} --name x --print", "swap {victim}"])
def test_a_command_with_a_whole_path_or_an_id_needs_no_working_directory(volume: Path, words: str) -> None:
    for name in ("orphan", "victim"):
        make_tree(volume / name, {"x": ""})
    orphan = done_well("swap", "--print-id", volume / "orphan").out.strip()
    (volume / "here").mkdir()
    typed = words.format(id=orphan, victim=volume / "victim")
    shell = f'cd "{volume}/here" && rmdir "{volume}/here" && exec {TRASHD} {typed}'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["sweep {} --name x --delete", "sweep {} --name x --print", "swap {}"])
def test_an_output_that_is_full_is_no_full_volume(volume: Path, words: str) -> None:
    make_tree(volume / "victim", {"x": ""})
    command = [TRASHD, *words.format(volume / "victim").split()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "standard output: No space left on device" in done.stderr) == (11, True)
    assert "reap" not in done.stderr


WORDS = {
    "swap": "{victim}", "rm": "{victim} missing", "undo": "", "list": "--volume {volume}",
    "browse": "--volume {volume}", "du": "--volume {volume}",
    "ls": "--volume {volume} {id}", "cat": "--volume {volume} {id}:file", "diff": "--volume {volume} {id}",
    "restore": "--volume {volume} {id} --to {top}/back", "keep": "--volume {volume} {id}",
    "reap": "--volume {volume} --now {id}", "check": "{victim}", "holders": "--volume {volume} {id}",
    "sweep": "{victim} --name file", "plan": "show {top}/plan.toml", "status": "",
    "doctor": "{volume}", "init": "{volume}", "mount": "--explain {volume} {volume}", "umount": "{volume}",
    "service": "status", "pause": "{volume}", "resume": "{volume}",
    "config": "show",
}  # fmt: skip
STREAMS = ("", "<&- >&- 2>&-", "2>/dev/full")
PLAN = """
[[rule]]
directory = "{}"
name = "file"
"""


def code_of(top: Path, command: str, redirected: str) -> int:
    """Its exit code with the streams so; it may not end by an error of ours."""
    top.mkdir()
    victim, orphan = make_tree(top / "victim", {"file": "x"}), make_tree(top / "orphan", {"file": "y"})
    (top / "plan.toml").write_text(PLAN.format(victim))
    words = WORDS[command].format(top=top, volume=top.parent, victim=victim, id=swapped(orphan)["id"])
    if not redirected:
        plain = trashd(command, *words.split(), cwd=top)
        assert "Traceback" not in plain.err
        return plain.code
    line = f"{TRASHD} {command} {words} </dev/null >/dev/null 2>{top}/told {redirected}"
    done = subprocess.run(["sh", "-c", line], env=environment({}), cwd=top, check=False)
    assert "Traceback" not in (top / "told").read_text()
    return done.returncode


def test_every_command_is_tried() -> None:
    assert sorted(WORDS) == sorted(group.list_commands(click.Context(group)))


@pytest.mark.parametrize("command", WORDS)
def test_a_command_does_the_same_whatever_its_streams_are(volume: Path, command: str) -> None:
    codes = [code_of(volume / str(number), command, redirected) for number, redirected in enumerate(STREAMS)]
    assert codes == [codes[0], UsageError.exit_code if command == "cat" else codes[0], codes[0]]


def test_what_can_not_be_told_stops_nothing(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "x"})
    done = subprocess.run(["sh", "-c", f"exec {TRASHD} swap missing {victim} 2>/dev/full"], cwd=volume, check=False)
    assert (done.returncode, list(victim.iterdir())) == (13, [])


NO_STORE, INCOMPLETE = 6, 13
COMMANDS = (
    "swap d", "rm d/a.log", "sweep d --name *.log", "check d", "list --volume .", "list --volume d", "list", "du",
    "restore ID", "restore e", "restore --volume d ID", "undo", "keep ID", "reap ID", "reap --now --all --volume d",
    "reap --volume .", "doctor .", "doctor --repair .",
)  # fmt: skip


def cut_short(file: Path) -> None:
    os.truncate(file, 10)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_others(file: Path) -> None:
    file.write_text('{"magic": "another program\'s"}')


@pytest.fixture(params=[cut_short, empty, of_others, Path.unlink], ids=lambda break_it: break_it.__name__)
def broken(volume: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of an orphan in a volume whose store does not say any more which it is."""
    make_tree(volume / "d", {"a.log": "1"})
    make_tree(volume / "e", {"f": "2"})
    orphan = swapped(volume / "e")["id"]
    request.param(volume / ".trashd/volume.json")
    yield orphan
    done_well("init", volume)


@pytest.mark.quick("doctor")
def test_every_command_is_refused_and_says_what_helps(volume: Path, broken: str) -> None:
    before = snapshot(volume)
    for line in COMMANDS:
        done = trashd(*line.replace("ID", broken).split(), cwd=volume)
        assert done.code == (INCOMPLETE if line == "du" else NO_STORE), (line, done)
        output = done.out + done.err
        assert output.count("damaged trash store") == 1, (line, done)
        assert f"trashd init {volume}" in output, (line, done)
        assert snapshot(volume) == before, line


@pytest.mark.usefixtures("broken")
def test_doctor_names_it_without_being_led_there(volume: Path) -> None:
    done = trashd("doctor")
    assert done.code == 1
    assert f"{volume}/.trashd/volume.json" in done.out
    assert f"trashd init {volume}" in done.out


@pytest.mark.usefixtures("broken")
def test_other_volumes_are_listed_all_the_same() -> None:
    with tmpfs_volume() as other:
        init(other)
        make_tree(other / "job", {"f": ""})
        orphan = str(swapped(other / "job")["id"])
        done = trashd("list")
        assert (orphan[-12:] in done.out, done.code) == (True, NO_STORE), done
        done_well("reap", "--now", orphan)
        done_well("list", "--volume", other)


def test_a_users_own_is_his_trouble_and_not_roots() -> None:
    with homes(ALICE) as home:
        job = make_tree(home[ALICE] / "work", {"job": {"f": "x"}}) / "job"
        for path in (job.parent, job, job / "f"):
            os.chown(path, ALICE, ALICE)
        (home[ALICE].parent).chmod(0o755)
        assert trashd_as(ALICE, home[ALICE], "swap", job).code == 0
        (file,) = home[ALICE].rglob("volume.json")
        cut_short(file)
        assert trashd_as(ALICE, home[ALICE], "swap", job).code == NO_STORE
        assert trashd_as(ALICE, home[ALICE], "list").code == NO_STORE
        assert trashd("list").code == 0
        assert trashd_as(ALICE, home[ALICE], "init", file.parents[1]).code == 0
        assert trashd_as(ALICE, home[ALICE], "restore", job).code == 0
        assert (job / "f").read_text() == "x"


# Of another format


@pytest.fixture(params=[1, 3], ids="format {}".format)
def unknown(volume: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """The format that volume.json states, in a volume whose store holds an orphan of `e`."""
    make_tree(volume / "d", {"a.log": "1"})
    make_tree(volume / "e", {"f": "2"})
    swapped(volume / "e")
    file = volume / ".trashd/volume.json"
    text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), "format": request.param}))
    yield request.param
    file.write_text(text)


def test_no_command_changes_a_store_of_an_unknown_format(volume: Path, unknown: int) -> None:
    before = snapshot(volume, with_times=True)
    for line in (*COMMANDS, "init ."):
        done = trashd(*line.replace("ID", "20261121").split(), cwd=volume)
        assert done.code == (INCOMPLETE if line == "du" else NO_STORE), (line, done)
        output = done.out + done.err
        assert f"{volume}/.trashd/volume.json (format {unknown}): unknown trash store format" in output, (line, done)
        assert f"mv {volume}/.trashd {volume}/.trashd-old" in output, (line, done)
        assert snapshot(volume, with_times=True) == before, line


def test_what_is_called_so_and_holds_no_users_folders_is_no_store() -> None:
    with tmpfs_volume() as volume:
        make_tree(volume / ".trashd", {"notes": ""})
        make_tree(volume / "d", {"e": {"f": ""}})
        done_well("swap", volume / "d/e")
        assert (volume / "d/.trashd/volume.json").exists()
