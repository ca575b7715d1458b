"""`trashd mount --explain`: what makes a mount fast, told by its daemon, and why it lacks the rest."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.uring_choice import ON, FastPath
from fusefs.linux.mount_calls import directory_of
from tests.support.background_mounts import as_owner, kill_daemon, mount
from tests.support.foreground_mount import until
from tests.support.real_filesystems import overlay_volume
from tests.support.trashd_command import done_well, trashd

pytestmark = pytest.mark.needs("root", "fuse")

OTHER = 1001
NAMES = [path.value for path in FastPath]


def explained(path: Path) -> dict[str, dict[str, Any]]:
    (told,) = done_well("mount", "--explain", "--json", path).objects()
    assert list(told["fast_paths"]) == NAMES
    return dict(told["fast_paths"])


def off(path: Path) -> dict[str, str]:
    """The fast paths that a mount lacks, and why."""
    return {name: one["why"] for name, one in explained(path).items() if not one["is_on"]}


def published(bench: Path) -> Path:
    """Where the daemon of its target tells of the fast paths."""
    return Path(os.fsdecode(directory_of(os.fsencode(bench / "target")))) / "fast-paths"


@pytest.mark.takes_engine
@pytest.mark.needs("fuse_uring", "passthrough")
def test_each_is_on_where_nothing_is_in_the_way(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--uring", "on", "--passthrough", "on")
    states = explained(bench / "target")
    assert states == {path.value: {"is_on": True, "why": ON[path]} for path in FastPath}


def test_plain_mode_has_none(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "engine=plain")
    states = explained(bench / "target")
    assert not any(state["is_on"] for state in states.values())
    assert states["engine"]["why"] == "engine=plain"
    assert (bench / "target/file").read_text() == "content"


@pytest.mark.takes_engine
@pytest.mark.needs("passthrough")
def test_what_is_switched_off_is_off_alone(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--passthrough", "off", "--uring", "off")
    assert off(bench / "target") == {"passthrough": "passthrough=off", "uring": "uring=off"}


@pytest.mark.takes_engine
def test_what_limits_kept_listings_is_told(bench: Path) -> None:
    with overlay_volume() as volume:
        mount(volume.path, bench / "target")
        state = explained(bench / "target")["kept-listings"]
        assert (state["is_on"], "by requests" in state["why"]) == (True, True)
        done_well("umount", bench / "target")


@pytest.mark.parametrize("name", [".", "target", "target/file", "target/no such name/at all", "source", "a link"])
def test_a_mount_is_found_by_what_is_in_it_and_what_it_serves(bench: Path, name: str) -> None:
    mount(bench / "source", bench / "target")
    (bench / "a link").symlink_to("target")
    if name == ".":
        assert trashd("mount", "--explain", ".", cwd=bench).code == 5
    else:
        assert f"{bench}/target serves {bench}/source\n" in done_well("mount", "--explain", bench / name).out


def test_a_mount_over_itself_is_found(bench: Path) -> None:
    mount(bench / "source")
    assert explained(bench / "source/file")
    done_well("umount", bench / "source")


@pytest.mark.takes_engine
@pytest.mark.quick("mount")
def test_people_get_a_line_for_each(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--passthrough", "off")
    _head, *lines = done_well("mount", "--explain", bench / "target").out.splitlines()
    assert [line.split()[0] for line in lines[: len(NAMES)]] == NAMES
    assert ["passthrough", "off", "passthrough=off"] in [line.split() for line in lines]


@pytest.mark.parametrize("name", ["uring", "passthrough", "kept-links"])
def test_a_word_of_an_earlier_version_is_a_warning_and_changes_nothing(bench: Path, name: str) -> None:
    done = mount(bench / "source", bench / "target", "-o", f"without={name}")
    assert f"trashd: warning: -o without={name} has no effect: " in done.err
    assert off(bench / "target").keys() <= {"uring", "passthrough"}


def test_nothing_mounted_is_told_with_what_to_do(bench: Path) -> None:
    done = trashd("mount", "--explain", bench / "source")
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        f"trashd: Not found: a mount of trashd at {bench}/source\n  hint: findmnt -t fuse.trashd lists its mounts\n"
    )
    assert not list((bench / "target").iterdir())


def test_a_killed_daemon_is_told(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    kill_daemon(bench / "target")
    done = trashd("mount", "--explain", "--json", bench / "target")
    assert done.code == 5
    assert set(done.objects()[0]["fast_paths"]) >= set(NAMES)
    assert json.loads(done.err)["error"] == "DaemonGone"


def test_what_an_older_daemon_does_not_tell_is_told(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    published(bench).unlink()
    done = trashd("mount", "--explain", bench / "target")
    assert done.code == 5
    assert "the fast paths of" in done.err


def test_what_is_no_text_of_ours_is_told(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    file = published(bench)
    file.write_text("{}")
    done = trashd("mount", "--explain", bench / "target")
    assert done.code == 1
    assert "are not understood" in done.err


def test_it_goes_with_the_mount(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    file = published(bench)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    done_well("umount", bench / "target")
    assert until(lambda: not file.parent.exists())  # umount waits for the daemon's end, but not for ever


@pytest.mark.takes_engine
def test_status_names_what_is_off(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--passthrough", "off", "--uring", "off")
    assert ", over /dev/fuse, without passthrough\n" in trashd("status").out
    (told,) = trashd("status", "--json").objects()[-1]["mounts"]
    assert told["fast_paths"] == {"engine": True, "uring": False, "passthrough": False, "kept-listings": True}


def test_status_names_plain_mode_alone(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "engine=plain")
    done = trashd("status").out
    assert ", in plain mode\n" in done
    assert "without" not in done


@pytest.mark.parametrize(
    "words",
    [
        ("--explain", ".", "elsewhere"), ("--explain", "-o", "engine=plain", "."), ("--explain", "-o", "ro", "."),
        ("--explain", "--replace", "."), ("--json", ".", "elsewhere"), ("-o", "without=haste", ".", "elsewhere"),
        ("--without", "kept-links", ".", "elsewhere"), ("-o", "engine=fast", ".", "elsewhere"),
        ("-o", "passthrough=on,engine=plain", ".", "elsewhere"), ("-o", "uring=on,engine=plain", ".", "elsewhere"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(bench: Path, words: tuple[str, ...]) -> None:
    assert trashd("mount", *words, cwd=bench / "source").code == 2


def test_a_users_mount_tells_him_and_goes_without_a_trace(users_bench: Path) -> None:
    source, target = users_bench / "source", users_bench / "target"
    assert as_owner(users_bench, "mount", source, target).code == 0
    (told,) = as_owner(users_bench, "mount", "--explain", "--json", source).objects()
    assert not told["fast_paths"]["passthrough"]["is_on"]
    assert "it takes root" in told["fast_paths"]["passthrough"]["why"]
    assert as_owner(users_bench, "mount", "--explain", target, uid=OTHER).code == 4
    done_well("umount", target)
    assert until(lambda: not any((users_bench / "run/trashd").iterdir()))


def test_a_user_can_not_have_passthrough(users_bench: Path) -> None:
    done = as_owner(users_bench, "mount", users_bench / "source", users_bench / "target", "--passthrough", "on")
    assert done.code == 3
    assert "passthrough=on: it takes root" in done.err
    assert not os.path.ismount(users_bench / "target")
    assert not any((users_bench / "run/trashd").iterdir())
