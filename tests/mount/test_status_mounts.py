"""What commands say of mounts: `trashd status`, `--explain`, and mount(8) with its words and exit codes."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusefs.core.mount_counters import OPERATIONS, decode_counters
from fusefs.core.uring_choice import FAST_PATH_EFFECTS, SLOW_BACKING, FastPath
from fusefs.linux.mount_calls import claim_directory
from tests.support.background_mounts import RUNTIME, abort, as_owner, daemon_of, kill_daemon, mount, our_mount
from tests.support.foreground_mount import until
from tests.support.other_users import run_as
from tests.support.proc_stat import stop
from tests.support.real_filesystems import bind_mount, overlay_volume, tmpfs_volume, unmount
from tests.support.transports import is_by_device, is_plain
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, trashd

pytestmark = pytest.mark.needs("root", "fuse")


USER, OTHER = 1000, 1001
DOCUMENT = Path(__file__).parents[2] / "docs/reference/metrics-and-events.md"


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
    (mount_result,) = done_well("mount", "--explain", "--json", bench / "target").objects()
    assert mount_result["fast_paths"]["engine"] == {"is_on": True, "why": SLOW_BACKING}


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
    assert "  not running; last request: " in for_people.out
    assert "--replace" in for_people.err


def test_a_hung_daemon_hangs_nobody_who_asks(target: Path) -> None:
    (target / "made").mkdir()
    pid = daemon_of(target)
    stop(pid)
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
    (fields,) = json.loads(run_as(USER, [TRASHD, "status", "--json"]).stdout)["mounts"]
    assert fields["operations"]["mkdir"]["n"] == 1


def test_a_stranger_can_change_nothing(target: Path) -> None:
    file = Path(os.fsdecode(claim_directory(os.fsencode(target)))) / "stats"
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
    (fields,) = json.loads(done.stdout)["mounts"]
    assert fields["operations"]["mkdir"]["n"] == 1


def test_missing_numbers_are_told(target: Path) -> None:
    os.unlink(claim_directory(os.fsencode(target)) + b"/stats")
    done = trashd("status")
    assert (done.code, done.out) == (5, "")
    assert "the counters of" in done.err


def test_a_new_mount_takes_away_what_an_earlier_one_with_its_device_number_left(target: Path) -> None:
    own = Path(os.fsdecode(claim_directory(os.fsencode(target))), "stats")
    left = RUNTIME / f"left-{os.getpid()}/stats"
    left.parent.mkdir()
    try:
        left.write_bytes(own.read_bytes())
        done_well("umount", target)
        mount(target.with_name("source"), target)  # gets the number that has just become free, as a rule
        assert (
            not left.exists() or decode_counters(left.read_bytes()).device != decode_counters(own.read_bytes()).device
        )
    finally:
        shutil.rmtree(left.parent)


def test_missing_numbers_of_one_mount_hide_no_other(bench: Path, target: Path) -> None:
    os.unlink(claim_directory(os.fsencode(target)) + b"/stats")
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
    assert "did you mean status?" in done.err


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
    done = as_owner(users_bench, "status", "--prometheus")
    assert (done.code, "XDG_RUNTIME_DIR" in done.err) == ((0, True) if mode is None else (5, False))
    assert "runtime directory" in done.err
    assert as_owner(users_bench, "umount", target).code == 0


NAMES = [path.value for path in FastPath]


def explained(path: Path) -> dict[str, dict[str, Any]]:
    (mount_result,) = done_well("mount", "--explain", "--json", path).objects()
    assert list(mount_result["fast_paths"]) == NAMES
    return dict(mount_result["fast_paths"])


def off(path: Path) -> dict[str, str]:
    """The fast paths that a mount lacks, and why."""
    return {name: one["why"] for name, one in explained(path).items() if not one["is_on"]}


def published(bench: Path) -> Path:
    """Where the daemon of its target tells of the fast paths."""
    return Path(os.fsdecode(claim_directory(os.fsencode(bench / "target")))) / "fast-paths"


@pytest.mark.takes_engine
@pytest.mark.needs("fuse_uring", "passthrough")
def test_each_is_on_where_nothing_is_in_the_way(bench: Path) -> None:
    mount(bench / "source", bench / "target", "--uring", "on", "--passthrough", "on")
    states = explained(bench / "target")
    assert states == {path.value: {"is_on": True, "why": FAST_PATH_EFFECTS[path]} for path in FastPath}


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
        assert (state["is_on"], "sends requests" in state["why"]) == (True, True)
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
        f"trashd: trashd mount at {bench}/source: not found\n  hint: findmnt -t fuse.trashd lists all trashd mounts\n"
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
    assert "can't determine which fast paths" in done.err


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
    assert "it needs root" in told["fast_paths"]["passthrough"]["why"]
    assert as_owner(users_bench, "mount", "--explain", target, uid=OTHER).code == 4
    done_well("umount", target)
    assert until(lambda: not any((users_bench / "run/trashd").iterdir()))


def test_a_user_can_not_have_passthrough(users_bench: Path) -> None:
    done = as_owner(users_bench, "mount", users_bench / "source", users_bench / "target", "--passthrough", "on")
    assert done.code == 3
    assert "passthrough=on: it needs root" in done.err
    assert not os.path.ismount(users_bench / "target")
    assert not any((users_bench / "run/trashd").iterdir())


REPO = Path(__file__).parents[2]
WithHelper = Callable[[str], subprocess.CompletedProcess[str]]
HELPER = Path(sys.executable).with_name("mount.fuse.trashd")
# $1 a directory with sbin/, the rest a command; mount(8) looks for its helpers in /sbin alone.
_WITH_HELPER = 'mount -t overlay -o "lowerdir=$1/sbin:$(realpath /sbin)" overlay "$(realpath /sbin)" && shift && "$@"'


def helper(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELPER, *words], capture_output=True, text=True, env=environment({}), check=False)


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """What `make install-system` installs."""
    with tmpfs_volume() as path:
        words = ["install-system", f"DESTDIR={path}", "ARGS="]  # not those of a `make test ARGS=` that runs us
        subprocess.run(["make", "-C", REPO, *words], check=True, stdout=subprocess.DEVNULL)
        yield path


@pytest.fixture
def with_helper(installed: Path, bench: Path) -> WithHelper:
    """Run a shell script in a mount namespace where it is installed."""

    def run(script: str) -> subprocess.CompletedProcess[str]:
        argv = ["unshare", "--mount", "sh", "-euc", _WITH_HELPER, "sh", str(installed), "sh", "-euxc", script]
        return subprocess.run(argv, capture_output=True, text=True, cwd=bench, check=False)

    return run


def test_mount_8_finds_it(bench: Path, with_helper: WithHelper) -> None:
    script = f"mount -t fuse.trashd -o ro,nosuid {bench}/source {bench}/target; cat target/file; umount target"
    done = with_helper(script)
    assert (done.returncode, done.stdout) == (0, "content"), done.stderr


def test_a_line_of_fstab_may_say_what_others_read(bench: Path, with_helper: WithHelper) -> None:
    options = "_netdev,nofail,x-systemd.automount,x-systemd.idle-timeout=1min,coherence=shared,timeout=2"
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd {options} 0 0\n")
    done = with_helper("mount -T fstab -a; mount -T fstab -a; cat target/file; umount target")
    assert (done.returncode, done.stdout.strip()) == (0, "content"), done.stderr


def test_a_line_of_fstab_with_noatime_mounts_and_prints_that_it_has_no_effect(
    bench: Path, with_helper: WithHelper
) -> None:
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd noatime,nodiratime 0 0\n")
    done = with_helper("mount -T fstab -a; cat target/file; mount -T fstab -o remount,ro target; umount target")
    assert (done.returncode, done.stdout.strip()) == (0, "content"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "no effect" in line]
    assert [line.split("-o ")[1].split()[0] for line in lines] == ["noatime", "nodiratime"]


def test_what_stands_and_works_is_not_mounted_again(bench: Path) -> None:
    (bench / "other").mkdir()
    assert helper(bench / "source", bench / "target").returncode == 0
    before = our_mount(bench / "target")
    assert helper(bench / "source", bench / "target").returncode == 0
    assert our_mount(bench / "target") == before
    for words in ((bench / "other", bench / "target"), (bench / "source", bench / "target", "-o", "ro")):
        done = helper(*words)
        assert done.returncode == 32
        assert "already mounted by trashd" in done.stderr


# Says at each step who may make a file, and what else is refused: in the mount, and in the tree behind it.
_REMOUNTED = r"""
tree() { awk -v at="$1" '$5 == at && / fuse.trashd / { sub(/.* fuse.trashd /, ""); print $1 }' /proc/self/mountinfo; }
flags() { awk -v at="$1" '$5 == at { print $6 }' /proc/self/mountinfo | tail -n 1 | grep -oE 'no(exec|suid)'; }
try() { touch "$1/made" 2> said && rm "$1/made" && echo may || grep -o Read-only said; }
mount -T fstab "$MOUNT"
TREE=$(tree "$MOUNT")
for words in ro rw,noexec rw; do
    mount -T fstab -o "remount,$words" "$MOUNT"
    echo $words: $(try "$MOUNT") $(try "$TREE") $(flags "$MOUNT") - $(flags "$TREE")
done
umount "$MOUNT"
"""


def test_a_remount_changes_the_mount(bench: Path, with_helper: WithHelper) -> None:
    """The backing path is another matter, and so is what fstab says of trashd's own options."""
    options = "nosuid,coherence=shared,timeout=7,_netdev,x-systemd.automount"
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd {options} 0 0\n")
    done = with_helper(f"MOUNT={bench}/target; {_REMOUNTED}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ro: Read-only may nosuid -",
        "rw,noexec: may may nosuid noexec -",
        "rw: may may nosuid noexec -",
    ]


def test_who_has_a_file_open_for_writing_keeps_a_mount_from_being_read_only(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    with (bench / "target/file").open("a"):
        done = helper(bench / "source", bench / "target", "-o", "remount,ro")
        assert done.returncode == 32
        assert "fuser -vm" in done.stderr
        (bench / "target/new").touch()


def test_what_is_no_mount_of_ours_is_not_remounted(bench: Path) -> None:
    done = helper(bench / "source", bench / "target", "-o", "remount,ro")
    assert done.returncode == 32
    assert "not a trashd mount" in done.stderr


def test_a_remount_with_a_word_that_nobody_knows_is_1(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    assert helper(bench / "source", bench / "target", "-o", "remount,bogus").returncode == 1


def test_what_stands_and_does_not_answer_is_told(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid = daemon_of(bench / "target")
    stop(pid)
    try:
        done = helper(bench / "source", bench / "target")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 32
    assert "does not respond" in done.stderr
    assert "umount --force" in done.stderr


def test_what_is_read_only_below_stands_too(bench: Path) -> None:
    with bind_mount(bench / "source", bench / "source", ["ro"]):
        assert helper(bench / "source", bench / "target").returncode == 0
        assert helper(bench / "source", bench / "target").returncode == 0
        done_well("umount", bench / "target")


def test_mount_8_tells_why_not(bench: Path, with_helper: WithHelper) -> None:
    done = with_helper(f"mount -t fuse.trashd {bench}/source/file {bench}/target")
    assert done.returncode == 32
    assert ": not a directory" in done.stderr


def test_it_mounts(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-o", "rw,noexec,_netdev", "-n", "-v").returncode == 0
    entry = our_mount(bench / "target")
    assert entry is not None
    assert "noexec" in entry.options


def test_a_dry_run_mounts_nothing(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-f").returncode == 0
    assert our_mount(bench / "target") is None


def test_sloppy_passes_over_unknown_options(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-s", "-o", "bogus").returncode == 0


@pytest.mark.parametrize(
    "words",
    [(), ("one",), ("one", "two", "three"), ("--bogus",), ("source", "target", "-o", "bogus"), ("a", "b", "-N", "1")],
    ids=" ".join,
)
def test_a_wrong_call_is_1(words: tuple[str, ...]) -> None:
    done = helper(*words)
    assert done.returncode == 1
    assert "hint: " in done.stderr


def test_what_is_not_permitted_is_1(bench: Path) -> None:
    done = run_as(1000, [HELPER, bench / "source", bench / "source"])
    assert done.returncode == 1


def test_a_failed_mount_is_32(bench: Path) -> None:
    for words in ((bench / "missing", bench / "target"), (bench / "source/file", bench / "target")):
        done = helper(*words)
        assert done.returncode == 32
        assert done.stderr.startswith("trashd: ")
