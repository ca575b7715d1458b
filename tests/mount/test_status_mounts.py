"""The mounts in `trashd status`: numbers that agree with what was done, whatever becomes of mount, daemon or reader."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusefs.core.mount_counters import OPERATIONS, decode
from fusefs.core.uring_choice import SLOW
from fusefs.linux.mount_calls import directory_of
from tests.support.background_mounts import RUNTIME, abort, as_owner, daemon_of, kill_daemon, mount
from tests.support.foreground_mount import until
from tests.support.other_users import run_as
from tests.support.real_filesystems import bind_mount, tmpfs_volume, unmount
from tests.support.transports import is_by_device, is_plain
from tests.support.trashd_command import TRASHD, CommandResult, done_well, trashd

pytestmark = pytest.mark.needs("root", "fuse")

USER, OTHER = 1000, 1001
DOCUMENT = Path(__file__).parents[2] / "docs/monitoring.md"


@pytest.fixture
def target(bench: Path) -> Path:
    """A mount that no other process uses."""
    mount(bench / "source", bench / "target", "--coherence", "exclusive")
    return bench / "target"


def mounts_in(done: CommandResult) -> dict[str, dict[str, Any]]:
    """All numbers that were printed, by mount point; no service runs here, so that the exit code is 5."""
    assert done.code == 5
    return {one["mount_point"]: dict(one) for told in done.objects() for one in told["mounts"]}


def stats_of(target: Path) -> dict[str, Any]:
    return mounts_in(trashd("status", "--json"))[str(target)]


def n_of(target: Path, operation: str) -> int:
    return int(stats_of(target)["operations"][operation]["n"])


def gauge_comes_to(target: Path, name: str, value: int) -> bool:
    return until(lambda: stats_of(target)["gauges"][name] == value)


def test_counts_agree_with_what_was_done(target: Path) -> None:
    for name in ("a", "b", "c"):
        (target / name).mkdir()
    (target / "a/inside").touch()
    with pytest.raises(OSError, match="not empty"):
        (target / "a").rmdir()
    (target / "b").rmdir()
    told = stats_of(target)["operations"]
    assert {name: (told[name]["n"], told[name]["n_failed"]) for name in ("mkdir", "create", "rmdir", "unlink")} == {
        "mkdir": (3, 0), "create": (1, 0), "rmdir": (2, 1), "unlink": (0, 0),
    }  # fmt: skip
    assert set(told) == set(OPERATIONS)


def test_times_agree_with_each_other(target: Path) -> None:
    (target / "made").mkdir()
    told = stats_of(target)["operations"]["mkdir"]
    assert told["mean_ns"] == told["total_ns"] == told["max_ns"] > 1000
    assert told["p50_ns"] <= told["p99_ns"] <= told["max_ns"] <= 2 * told["p50_ns"]  # a bucket ends at twice its begin
    assert sum(told["counts"]) == 1


def test_gauges_follow_a_moment_later(target: Path) -> None:
    with open(target / "file", "rb"):
        assert gauge_comes_to(target, "n_handles", 1)
    assert gauge_comes_to(target, "n_handles", 0)
    assert stats_of(target)["updated_ns"] >= stats_of(target)["started_ns"]


@pytest.mark.quick("status")
def test_the_table_has_a_line_for_each_mount(target: Path) -> None:
    (target / "made").mkdir()
    head, line = trashd("status").out.splitlines()
    assert head.split() == ["mount", "requests", "errors", "mean", "p99", "max", "nodes", "cache", "daemon"]
    over = "/dev/fuse" if is_by_device() or is_plain() else "io_uring"
    assert re.match(rf"{target} +[1-9][0-9]* +[0-9]+  +[0-9.]+ [mµ]?s  .*  [0-9.]+, up [0-9]+s, over {over}", line)


@pytest.mark.takes_engine
def test_an_engine_that_waits_for_a_slow_filesystem_is_explained(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--backing", "slow")
    (bench / "target/made").mkdir()
    assert gauge_comes_to(bench / "target", "is_slow", 1)
    (told,) = done_well("mount", "--explain", "--json", bench / "target").objects()
    assert told["fast_paths"]["engine"] == {"is_on": True, "why": SLOW}


@pytest.mark.parametrize("end", [kill_daemon, abort])
def test_a_daemon_that_was_ended_leaves_its_last_numbers(target: Path, end: Callable[[Path], None]) -> None:
    (target / "made").mkdir()
    end(target)
    done = trashd("status", "--json")
    told = mounts_in(done)[str(target)]
    assert told["is_running"] is False
    assert told["operations"]["mkdir"]["n"] == 1
    assert [json.loads(line)["error"] for line in done.err.splitlines()] == ["NotRunning", "DaemonGone"]
    for_people = trashd("status")
    assert "  gone; last asked: " in for_people.out
    assert "--replace" in for_people.err


def test_a_hung_daemon_hangs_nobody_who_asks(target: Path) -> None:
    (target / "made").mkdir()
    pid = daemon_of(target)
    os.kill(pid, signal.SIGSTOP)
    assert stats_of(target)["operations"]["mkdir"]["n"] == 1
    assert stats_of(target)["is_running"] is True
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("over_itself", [False, True])
def test_the_next_mount_begins_at_zero(bench: Path, over_itself: bool, is_replaced: bool) -> None:
    words = (bench / "source",) if over_itself else (bench / "source", bench / "target")
    mount(*words)
    (words[-1] / "first").mkdir()
    if is_replaced:
        kill_daemon(words[-1])
        mount("--replace", *words)
    else:
        done_well("umount", words[-1])
        mount(*words)
    assert n_of(words[-1], "mkdir") == 0
    assert stats_of(words[-1])["pid"] == daemon_of(words[-1])


def test_numbers_of_a_mount_that_is_gone_are_nobodys(target: Path) -> None:
    kill_daemon(target)
    unmount(target)
    assert mounts_in(trashd("status", "--json")) == {}
    assert done_well("mount", target.with_name("source"), target)
    assert n_of(target, "mkdir") == 0


def test_two_mounts_are_not_mixed(bench: Path, target: Path) -> None:
    (target / "made").mkdir()
    other = bench / "other"
    other.mkdir()
    with tmpfs_volume() as volume:
        mount(volume, other)
        (other / "made").touch()
        assert (n_of(target, "mkdir"), n_of(other, "mkdir")) == (1, 0)
        assert (n_of(target, "create"), n_of(other, "create")) == (0, 1)
        assert set(mounts_in(trashd("status", "--json"))) == {str(target), str(other)}
        done_well("umount", other)


def test_a_stranger_may_look_at_roots(target: Path) -> None:
    (target / "made").mkdir()
    (told,) = json.loads(run_as(USER, [TRASHD, "status", "--json"]).stdout)["mounts"]
    assert told["operations"]["mkdir"]["n"] == 1


def test_a_stranger_can_change_nothing(target: Path) -> None:
    file = Path(os.fsdecode(directory_of(os.fsencode(target)))) / "stats"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert file.stat().st_uid == 0
    assert run_as(USER, ["truncate", "--size=0", file]).returncode != 0
    assert run_as(USER, ["unlink", file]).returncode != 0
    assert stats_of(target)["is_running"] is True


def test_a_mount_that_is_seen_twice_is_one(bench: Path, target: Path) -> None:
    (bench / "bound").mkdir()
    with bind_mount(target, bench / "bound"):
        assert len(mounts_in(trashd("status", "--json"))) == 1


def test_another_mount_namespace_finds_them(target: Path) -> None:
    (target / "made").mkdir()
    done = subprocess.run(["unshare", "--mount", TRASHD, "status", "--json"], capture_output=True, check=False)
    (told,) = json.loads(done.stdout)["mounts"]
    assert told["operations"]["mkdir"]["n"] == 1


def test_missing_numbers_are_told(target: Path) -> None:
    os.unlink(directory_of(os.fsencode(target)) + b"/stats")
    done = trashd("status")
    assert (done.code, done.out) == (5, "")
    assert "the numbers of" in done.err


def test_a_new_mount_takes_away_what_an_earlier_one_with_its_device_number_left(target: Path) -> None:
    own = Path(os.fsdecode(directory_of(os.fsencode(target))), "stats")
    left = RUNTIME / f"left-{os.getpid()}/stats"
    left.parent.mkdir()
    try:
        left.write_bytes(own.read_bytes())
        done_well("umount", target)
        mount(target.with_name("source"), target)  # gets the number that has just become free, as a rule
        assert not left.exists() or decode(left.read_bytes()).device != decode(own.read_bytes()).device
    finally:
        shutil.rmtree(left.parent)


def test_missing_numbers_of_one_mount_hide_no_other(bench: Path, target: Path) -> None:
    os.unlink(directory_of(os.fsencode(target)) + b"/stats")
    mount(bench / "source")
    assert list(mounts_in(trashd("status", "--json"))) == [str(bench / "source")]


def test_without_a_mount_no_metric_has_a_value() -> None:
    assert metrics_of(done_well("status", "--prometheus")) == {}


@pytest.mark.parametrize("words", [("--json",), ("--watch",)], ids=" ".join)
def test_prometheus_with_another_format_makes_no_sense(words: tuple[str, ...]) -> None:
    assert trashd("status", "--prometheus", *words).code == 2


def test_stats_is_an_unknown_command_and_its_hint_is_status() -> None:
    done = trashd("stats")
    assert done.code == 2
    assert "Did you mean status?" in done.err


def metrics_of(done: CommandResult) -> dict[str, dict[str, float]]:
    """Values by metric, and by the labels but the mount's."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(done.out):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            label = ",".join(f"{value}" for name, value in sorted(sample.labels.items()) if name != "mount")
            found.setdefault(sample.name, {})[label] = sample.value
    return found


def test_prometheus_reads_what_was_done(target: Path) -> None:
    (target / "made").mkdir()
    (target / "made").rmdir()
    told = metrics_of(done_well("status", "--prometheus"))
    count, total = (told[f"trashd_mount_operation_seconds_{end}"]["mkdir"] for end in ("count", "sum"))
    assert count == 1
    assert 0 < total < 1
    assert told["trashd_mount_operation_seconds_bucket"]["+Inf,mkdir"] == 1
    assert told["trashd_mount_errors_total"]["mkdir"] == 0
    assert told["trashd_mount_up"][""] == 1
    assert "unlink" not in told["trashd_mount_errors_total"]


def test_prometheus_learns_that_a_daemon_is_gone(target: Path) -> None:
    kill_daemon(target)
    done = trashd("status", "--prometheus")
    assert done.code == 5
    assert metrics_of(done)["trashd_mount_up"][""] == 0


def test_every_metric_is_documented(target: Path) -> None:
    (target / "made").mkdir()
    text = done_well("status", "--prometheus").out
    told = set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE))
    documented = re.findall(r"^\| `(trashd_mount_\w+)`", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(told)


def test_a_users_mount_has_its_numbers_in_his_runtime_directory(users_bench: Path) -> None:
    target = users_bench / "target"
    assert as_owner(users_bench, "mount", users_bench / "source", target).code == 0
    assert run_as(USER, ["mkdir", target / "made"]).returncode == 0
    told = mounts_in(as_owner(users_bench, "status", "--json"))
    assert told[str(target)]["operations"]["mkdir"]["n"] == 1
    (directory,) = (users_bench / "run/trashd").iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert as_owner(users_bench, "umount", target).code == 0
    assert until(lambda: not any((users_bench / "run/trashd").iterdir()))


def test_a_users_numbers_are_his_alone(users_bench: Path) -> None:
    target = users_bench / "target"
    assert as_owner(users_bench, "mount", users_bench / "source", target).code == 0
    assert str(target) not in as_owner(users_bench, "status", "--json", uid=OTHER).out
    assert mounts_in(trashd("status", "--json")) == {}
    assert as_owner(users_bench, "umount", target).code == 0


@pytest.mark.parametrize("mode", [None, 0o500], ids=["missing", "closed"])
def test_without_a_runtime_directory_the_mount_works_and_says_why(users_bench: Path, mode: int | None) -> None:
    target = users_bench / "target"
    if mode is None:
        (users_bench / "run").rmdir()
    else:
        (users_bench / "run").chmod(mode)
    assert as_owner(users_bench, "mount", users_bench / "source", target).code == 0
    assert run_as(USER, ["mkdir", target / "made"]).returncode == 0
    done = as_owner(users_bench, "status")
    assert done.code == 5
    assert "runtime directory" in done.err
    assert as_owner(users_bench, "umount", target).code == 0
