"""`trashd mount --explain`: what makes a mount fast, told by its daemon, and why it lacks the rest."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.fast_paths import ALWAYS, SAVES, FastPath
from fusefs.core.mount_options import URING_AUTO, WITHOUT
from fusefs.linux.mount_claims import directory_of
from tests.support.background_mounts import as_owner, kill_daemon, mount
from tests.support.foreground_mount import until
from tests.support.real_filesystems import overlay_volume
from tests.support.trashd_command import done_well, switched_off, trashd

pytestmark = pytest.mark.needs("root", "fuse")

USER, OTHER = 1000, 1001
NAMES = [path.value for path in FastPath if path not in ALWAYS]
RESTING = {  # what goes off with each, and which of them it takes
    "kept-listings": {"unopened-directories": "kept-listings"},
}


def explained(path: Path) -> dict[str, dict[str, Any]]:
    (told,) = done_well("mount", "--explain", "--json", path).objects()
    paths = told["fast_paths"]
    assert [name for name in paths if name in NAMES] == NAMES
    return dict(paths)


def off(path: Path) -> dict[str, str]:
    """The fast paths that a mount lacks, but for those that this run or machine has switched off, and why."""
    of_this_run = {why for name in switched_off() for why in (f"without={name}", f"{name}=off", f"it takes {name}")}
    of_this_run |= {URING_AUTO}
    states = explained(path)
    return {name: one["why"] for name, one in states.items() if not one["is_on"] and one["why"] not in of_this_run}


def published(bench: Path) -> Path:
    """Where the daemon of its target tells of the fast paths."""
    return Path(os.fsdecode(directory_of(os.fsencode(bench / "target")))) / "fast-paths"


@pytest.mark.rests_on("engine")
def test_all_is_on_where_nothing_is_in_the_way(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--coherence", "exclusive")
    assert off(bench / "target") == {}


@pytest.mark.rests_on(*NAMES)
@pytest.mark.needs("fuse_uring")
def test_each_tells_what_it_saves(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--uring", "on")
    assert {name: state["why"] for name, state in explained(bench / "target").items()} == {
        name: f"saves {SAVES[FastPath(name)]}" for name in NAMES
    }


@pytest.mark.rests_on(*RESTING, "unopened-directories")  # which is off with them
@pytest.mark.parametrize("name", [path.value for path in WITHOUT])
def test_one_that_is_switched_off_is_off_alone(bench: Path, name: str) -> None:
    mount(bench / "source", bench / "target", "-o", f"without={name}")
    told = {name: f"without={name}"} | {other: f"it takes {taken}" for other, taken in RESTING.get(name, {}).items()}
    assert {**off(bench / "target"), name: f"without={name}"} == told
    assert (bench / "target/file").read_text() == "content"


def test_plain_mode_has_none(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "engine=plain")
    states = explained(bench / "target")
    assert list(states) == [path.value for path in FastPath]
    assert not any(state["is_on"] for state in states.values())
    assert states["engine"]["why"] == "engine=plain"
    assert (bench / "target/file").read_text() == "content"


@pytest.mark.rests_on("passthrough")
def test_passthrough_is_off_by_its_own_option_too(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--passthrough", "off")
    assert off(bench / "target") == {"passthrough": "passthrough=off"}


@pytest.mark.rests_on("passthrough")
def test_passthrough_that_must_be_is(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--passthrough", "on")
    assert "passthrough" not in off(bench / "target")


@pytest.mark.rests_on("kept-listings")
@pytest.mark.parametrize("coherence", ["exclusive", "shared"])
def test_listings_are_kept_whether_others_change_the_source_or_not(bench: Path, coherence: str) -> None:
    with overlay_volume() as volume:
        mount(volume.path, bench / "target", "--coherence", coherence)
        assert "kept-listings" not in off(bench / "target")
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


@pytest.mark.rests_on("engine")
@pytest.mark.quick("mount")
def test_people_get_a_line_for_each(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "without=kept-links")
    _head, *lines = done_well("mount", "--explain", bench / "target").out.splitlines()
    assert [line.split()[0] for line in lines[: len(NAMES)]] == NAMES
    assert ["kept-links", "off", "without=kept-links"] in [line.split() for line in lines]


@pytest.mark.parametrize("name", ["uring", "passthrough"])
def test_a_word_of_an_earlier_version_is_a_warning_and_changes_nothing(bench: Path, name: str) -> None:
    done = mount(bench / "source", bench / "target", "-o", f"without={name}")
    assert f"trashd: warning: -o without={name} has no effect: use {name}=off\n" in done.err
    assert f"without={name}" not in [state["why"] for state in explained(bench / "target").values()]


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


@pytest.mark.rests_on("engine")
def test_status_names_what_is_off(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "without=kept-links")
    assert "without kept-links" in trashd("status").out.replace(", ", " without ")
    (told,) = trashd("status", "--json").objects()[-1]["mounts"]
    assert list(told["fast_paths"]) == NAMES
    assert not told["fast_paths"]["kept-links"]


def test_status_is_silent_on_uring_that_the_mount_was_not_asked_for(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--uring", "off")
    done = trashd("status").out
    assert str(bench / "target") in done
    assert "uring" not in done
    assert "native-core" not in done


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
