"""`trashd reap`: its pace, its sum, its stop, what it says of the space, --one, --free and --paced."""

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs.cli.reap import ReapOptions, has_expired, reap_all
from fusefs.cli.swap_paths import SwapBatch, swap_all
from fusefs.linux.kernel import Kernel
from fusefs.store import orphans
from fusefs.store.orphans import ListedContainer, find_container, find_containers
from fusefs.store.swap import remove_path
from tests.support.make_trees import IMMUTABLE, fill, make_tree, set_flags
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import raw
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, swapped, trashd

pytestmark = pytest.mark.needs("root")


LARGE = b"x" * (1 << 20)
"""More than `--wait` tolerates to be missing."""
N_LARGE = 500
LIMITED = 61_234
"""The uid of no other test's: RLIMIT_NPROC counts a user's processes on the whole machine."""


def make_orphan(volume: Path, name: str = "victim") -> str:
    """The id of an orphan of four entries."""
    victim = make_tree(volume / name, {"file": LARGE, "below": {"deep": "more"}})
    return str(swapped(victim)["id"])


def make_large_orphan(volume: Path, name: str) -> str:
    """The id of one that at an entry a second is never done by the time that it is looked at."""
    return str(swapped(fill(volume / name, N_LARGE))["id"])


def tree_of(volume: Path, identifier: str, state: str = "orphans") -> Path:
    return volume / f".trashd/u/0/{state}/{identifier}/tree"


@contextmanager
def slow_reap(volume: Path, *identifiers: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun with the first of them, an entry a second."""
    words = [TRASHD, "reap", "--now", "--json", "--max-rate", "1", "--volume", str(volume), *identifiers]
    with subprocess.Popen(
        words, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not tree_of(volume, identifiers[0], "reaping").exists():
            time.sleep(0.01)
        yield process


# Options


@pytest.mark.parametrize(
    "words", [("--threads", "1"), ("--threads", "3"), ("--max-rate", "1000/s"), ("--count",), ("--paced",)]
)
def test_whatever_the_way_all_is_removed(volume: Path, words: tuple[str, ...]) -> None:
    identifier = make_orphan(volume)
    done = done_well("reap", "--now", "--volume", volume, *words, identifier)
    assert done.out.startswith(f"{identifier}: 4 entries removed")
    assert done_well("list", "--volume", volume, "--json").out == ""


def test_a_pace_tells_the_bytes(volume: Path) -> None:
    identifier = make_orphan(volume)
    done = done_well("reap", "--now", "--volume", volume, "--max-bytes", "1G/s", identifier)
    assert done.out == f"{identifier}: 4 entries removed (1.00 MiB)\n"


def test_a_count_tells_programs_what_there_was(volume: Path) -> None:
    identifier = make_orphan(volume)
    (reap_result,) = done_well("reap", "--now", "--count", "--json", "--volume", volume, identifier).objects()
    assert reap_result["survey"]["n_entries"] == reap_result["report"]["removed"] == 4
    assert reap_result["survey"]["n_bytes"] >= len(LARGE)


@pytest.mark.parametrize("verb", [("reap", "--now"), ("restore",), ("reap", "--force", "--yes"), ("keep",)])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_what_is_too_short_to_be_an_id_means_no_orphan_though_there_is_but_one(
    volume: Path, verb: tuple[str, ...], n: int
) -> None:
    identifier = make_orphan(volume)
    done = trashd(*verb, "--volume", volume, identifier[:n])
    if verb == ("restore",) and n:  # it may be a path
        assert done.code == 5
    else:
        assert done.code == 2
    assert tree_of(volume, identifier).exists()


# The sum


def test_of_several_the_sum_is_told(volume: Path) -> None:
    for name in ("a", "b"):
        make_orphan(volume, name)
    *_, told = done_well("reap", "--all", "--now", "--volume", volume).out.splitlines()
    assert told.startswith("2 removed, 0 failed (in quarantine), 0 skipped: 8 entries in ")
    assert told.endswith("/s")


def test_the_sum_counts_what_failed(volume: Path) -> None:
    refused = tree_of(volume, make_orphan(volume, "a")) / "file"
    make_orphan(volume, "b")
    set_flags(refused, IMMUTABLE)
    done = trashd("reap", "--all", "--now", "--volume", volume)
    assert done.code == 13
    assert done.out.splitlines()[-1].startswith("1 removed, 1 failed (in quarantine), 0 skipped: 6 entries in ")
    done_well("reap", "--force", "--yes", "--volume", volume, refused.parts[-3])


# Where few processes are allowed


def limited(n_processes: int, *words: object) -> CommandResult:
    """A command of a user who may have so many processes."""
    limit = ["prlimit", f"--nproc={n_processes}", "setpriv", f"--reuid={LIMITED}", f"--regid={LIMITED}"]
    command = [*limit, "--clear-groups", TRASHD, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment({"HOME": "/nonexistent"}), check=False
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def test_a_reap_that_may_not_fork_goes_on_alone(volume: Path) -> None:
    volume.chmod(0o1777)
    victim = make_tree(volume / "victim", {})
    for number in range(20):
        fill(victim / str(number), 1000)
    subprocess.run(["chown", "-R", f"{LIMITED}:{LIMITED}", victim], check=True)
    assert limited(2, "swap", victim).code == 0
    done = limited(2, "reap", "--now", "--all", "--threads", "4")
    assert (done.code, "20021 entries removed" in done.out.replace(",", "")) == (0, True), done


def test_a_command_that_can_start_no_process_names_the_limit() -> None:
    done = limited(1, "list")
    assert (done.code, "ulimit -u" in done.err) == (11, True), done


# Who keeps it meanwhile


def test_what_was_kept_after_it_was_chosen_is_not_reaped(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [find_container(Kernel(), (raw(volume),), make_orphan(volume, name)) for name in ("kept", "over")]
    for entry, word in zip(chosen, ("7d", "0"), strict=True):
        done_well("keep", entry.id, "--for", word, "--volume", volume)
    assert reap_all(Kernel(), chosen, ReapOptions(volumes=(raw(volume),), is_meant=has_expired)) == 0
    output_lines = capsys.readouterr().out.splitlines()
    assert output_lines[:2] == [
        f"{chosen[0].id}: skipped: pinned, or its retention was extended",
        f"{chosen[1].id}: 4 entries removed",
    ]
    assert os.listdir(volume / ".trashd/u/0/orphans") == [chosen[0].id]


@pytest.mark.parametrize("pinned_before", [True, False])
def test_a_longer_term_wins_over_a_reap_that_has_chosen_already(
    volume: Path, capsys: pytest.CaptureFixture[str], pinned_before: bool
) -> None:
    identifiers = [make_orphan(volume, name) for name in ("longer", "pinned", "shorter", "untouched")]
    if pinned_before:
        done_well("keep", identifiers[3], "--volume", volume)
    chosen = find_containers(Kernel(), (raw(volume),), identifiers)
    for identifier, term in zip(identifiers[:3], (["--for", "7d"], [], ["--for", "1h"]), strict=True):
        done_well("keep", identifier, *term, "--volume", volume)
    assert reap_all(Kernel(), chosen, ReapOptions(volumes=(raw(volume),))) == 0
    kept = identifiers[:2]
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{one}: skipped: pinned, or its retention was extended" for one in kept
    ]
    assert sorted(os.listdir(volume / ".trashd/u/0/orphans")) == sorted(kept)


def test_many_ids_are_found_by_one_look_at_the_stores(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identifiers = [make_orphan(volume, name) for name in "abc"]
    all_entries, reads = orphans.list_all_containers, []

    def read(*args: Any) -> list[ListedContainer]:
        reads.append(args)
        return all_entries(*args)

    monkeypatch.setattr(orphans, "list_all_containers", read)
    found = find_containers(Kernel(), (raw(volume),), [identifiers[2], identifiers[0], identifiers[1][-12:]])
    assert [entry.id for entry in found] == [identifiers[2], identifiers[0], identifiers[1]]
    assert len(reads) == 1


def test_programs_are_told_what_all_left(volume: Path) -> None:
    kept = make_orphan(volume)
    done_well("keep", kept, "--volume", volume)
    done = done_well("reap", "--all", "--now", "--json", "--volume", volume)
    assert [(told["id"], told["lost"]) for told in done.objects()] == [(kept, "pinned")]
    assert done.err == ""


def test_nothing_that_we_say_proposes_to_reap_all_before_its_time() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("tests/cli/golden/*")]
    pages += root.glob("fusefs/**/*.py")
    assert [path for path in pages if "--all --now" in path.read_text().replace("\\", "")] == []


# The dry run, and the question


@pytest.mark.parametrize("options", [("--all", "--now"), ("--all",), ("--pinned", "--now"), ()])
@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_dry_run_says_what_the_same_reap_then_takes(
    volume: Path, options: tuple[str, ...], json_option: tuple[str, ...]
) -> None:
    expired, waiting, kept = (make_orphan(volume, name) for name in ("expired", "waiting", "kept"))
    done_well("keep", expired, "--for", "0", "--volume", volume)
    done_well("keep", kept, "--volume", volume)
    output = done_well("reap", *options, "--dry-run", *json_option, "--volume", volume).out
    assert set(os.listdir(volume / ".trashd/u/0/orphans")) == {expired, waiting, kept}
    done_well("reap", *options, "--volume", volume)
    gone = {expired, waiting, kept} - set(os.listdir(volume / ".trashd/u/0/orphans"))
    assert {one for one in (expired, waiting, kept) if one in output} == gone


@pytest.mark.parametrize(("typed", "code", "n_left"), [("y\n", 0, 0), ("n\n", 3, 2), ("\n", 3, 2), ("\x04", 130, 2)])
def test_on_a_terminal_it_asks_before_several_go_before_their_time(
    volume: Path, typed: str, code: int, n_left: int
) -> None:
    for name in ("a", "b"):
        make_orphan(volume, name)
    terminal = Terminal("reap", "--all", "--now", "--volume", volume)
    terminal.wait_for("Permanently delete these 2 orphans before they expire? [y/N]:")
    assert len(os.listdir(volume / ".trashd/u/0/orphans")) == 2
    terminal.type(typed)
    assert (terminal.end(), len(os.listdir(volume / ".trashd/u/0/orphans"))) == (code, n_left)


@pytest.mark.parametrize("case", ["one", "expired", "--yes", "--json"])
def test_on_a_terminal_nobody_is_asked_about(volume: Path, case: str) -> None:
    identifiers = [make_orphan(volume, name) for name in ("a", "b")]
    words = identifiers[:1] if case == "one" else ["--all"]
    if case == "expired":
        done_well("keep", identifiers[0], "--for", "0", "--volume", volume)
    words += [case] if case.startswith("--") else []
    terminal = Terminal("reap", "--now", "--volume", volume, *words)
    assert (terminal.end(), "[y/N]" in terminal.output) == (0, False)


# The stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_reap_tells_programs_so_and_leaves_the_rest_to_the_next(volume: Path, number: signal.Signals) -> None:
    stopped, untried = make_large_orphan(volume, "a"), make_orphan(volume, "b")
    with slow_reap(volume, stopped, untried) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    (told,) = map(json.loads, out.splitlines())
    assert (told["id"], told["lost"], told["report"]["stopped"]) == (stopped, None, True)
    assert told["report"]["removed"] < N_LARGE
    assert err == "trashd: stopping; a second signal stops at once\n"
    assert tree_of(volume, untried).exists()
    # What was begun is past its retention, what was not is not.
    assert done_well("reap", "--volume", volume).out.startswith(f"{stopped}: ")
    assert os.listdir(volume / ".trashd/u/0/orphans") == [untried]


def test_list_tells_that_a_reaper_has_begun_and_whether_it_is_at_it(volume: Path) -> None:
    orphan = make_large_orphan(volume, "a")
    with slow_reap(volume, orphan) as process:
        (at_work,) = done_well("list", "--json", "--volume", volume).objects()
        shown_at_work = done_well("list", "--volume", volume).out
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    (stopped,) = done_well("list", "--json", "--volume", volume).objects()
    assert [(one["state"], one["partial"], one["is_stopped"]) for one in (at_work, stopped)] == [
        ("reaping", True, False),
        ("reaping", True, True),
    ]
    assert " reaping  " in shown_at_work
    assert " reaping (stopped)  " in done_well("list", "--volume", volume).out


# The space


def test_what_came_back_is_told_volume_by_volume(volume: Path) -> None:
    for name in ("a", "b"):
        make_orphan(volume, name)
    *_, told = done_well("reap", "--all", "--now", "--wait", "--volume", volume).out.splitlines()
    assert re.fullmatch(rf"{volume}: 2\.\d+ MiB became free", told)


def test_an_orphan_in_quarantine_is_a_reason_and_13(volume: Path) -> None:
    refused = tree_of(volume, make_orphan(volume)) / "file"
    set_flags(refused, IMMUTABLE)
    done = trashd("reap", "--all", "--now", "--wait", "--volume", volume)
    assert done.code == 13
    assert (
        done.out.splitlines()[-1] == f"  {refused.parts[-3]} could not be deleted completely: the rest is in quarantine"
    )
    done_well("reap", "--force", "--yes", "--volume", volume, refused.parts[-3])


def test_what_was_not_reaped_is_not_waited_for(volume: Path) -> None:
    done = done_well("reap", "--all", "--wait", "--volume", volume)
    assert done.out == ""


def test_second_signal_ends_a_reap_at_once_and_nothing_is_lost(volume: Path) -> None:
    orphan = make_large_orphan(volume, "a")
    with slow_reap(volume, orphan) as process:
        os.kill(process.pid, signal.SIGSTOP)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            process.send_signal(number)
        _out, err = process.communicate(timeout=60)
    assert -process.returncode in (signal.SIGINT, signal.SIGTERM)
    assert "Traceback" not in err
    assert done_well("reap", "--volume", volume).out.startswith(f"{orphan}: ")


def test_signal_that_ends_a_reap_ends_the_whole_command(volume: Path) -> None:
    first, second = volume / "first", volume / "second"
    first.mkdir()
    second.mkdir()
    batch = SwapBatch([bytes(first), bytes(second)], verb=remove_path, after=lambda _removed: 130)
    assert swap_all(batch) == 130
    assert not first.exists()
    assert second.exists()


N_TASKS, N_ORPHANS = 8, 20


def expired(tree: Path) -> str:
    """The id of an orphan that may go."""
    return str(swapped(tree, "--keep-for", "0s")["id"])


def small(volume: Path, name: str) -> str:
    return expired(make_tree(volume / name, {"file": "", "below": {"deep": ""}}))


def states(volume: Path) -> dict[str, str]:
    """What is in which state's directory."""
    found = (volume / ".trashd/u/0").glob("*ing/*"), (volume / ".trashd/u/0/orphans").iterdir()
    return {one.name: one.parent.name for some in found for one in some}


def start_task(volume: Path) -> subprocess.Popen[str]:
    words = (TRASHD, "reap", "--one", "--json", "--volume", str(volume))
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment({}))


def test_tasks_that_run_at_once_reap_every_orphan_exactly_once(volume: Path) -> None:
    orphans = {expired(fill(volume / f"job{n}", 300)) for n in range(N_ORPHANS)}
    reaped = Counter[str]()
    for _ in range(N_ORPHANS):
        tasks = [start_task(volume) for _ in range(N_TASKS)]
        ended = [(*task.communicate(), task.returncode) for task in tasks]
        assert [(err, code) for _out, err, code in ended if err or code] == []
        told = [out for out, _err, _code in ended if out]
        reaped.update(identifier for identifier in orphans for out in told if identifier in out)
        if not told:
            break
    assert reaped == dict.fromkeys(orphans, 1)
    assert states(volume) == {}


@pytest.mark.quick("reap")
def test_one_is_reaped_and_the_oldest(volume: Path) -> None:
    first, second = small(volume, "a"), small(volume, "b")
    done = done_well("reap", "--one", "--volume", volume)
    assert done.out == f"{first}: 4 entries removed\n"
    assert states(volume) == {second: "orphans"}


def test_with_nothing_left_it_has_done_what_it_should_and_says_so(volume: Path) -> None:
    done = done_well("reap", "--one", "--volume", volume)
    assert (done.out, done.err) == ("", "no orphan has expired\n")


def test_what_fails_is_one_too_and_the_next_task_takes_another(volume: Path) -> None:
    stuck, other = small(volume, "a"), small(volume, "b")
    set_flags(volume / f".trashd/u/0/orphans/{stuck}/tree/file", IMMUTABLE)
    assert trashd("reap", "--one", "--volume", volume).code == 13
    done = done_well("reap", "--one", "--volume", volume)
    assert done.out.startswith(f"{other}: ")
    done_well("reap", "--force", "--yes", "--volume", volume, stuck)


MIB = 1 << 20


@pytest.fixture
def ids(volume: Path) -> dict[str, str]:
    """Of orphans of 3 MiB each: two that have expired, two that have not, of which one is pinned."""
    made = {}
    for name, keep_for in (("first", "1s"), ("second", "1s"), ("later", "1d"), ("pinned", "1d")):
        directory = volume / name
        directory.mkdir()
        (directory / "file").write_bytes(bytes(3 * MIB))
        made[name] = swapped(directory, "--keep-for", keep_for)["id"]
    done_well("keep", made["pinned"])
    time.sleep(2.1)  # a term ends in seconds
    return made


def left(volume: Path, ids: dict[str, str]) -> set[str]:
    there = {one["id"] for one in done_well("list", "--json", "--volume", volume).objects()}
    return {name for name, identifier in ids.items() if identifier in there}


def test_the_oldest_that_have_expired_go_first_and_no_more_than_is_wanted(volume: Path, ids: dict[str, str]) -> None:
    assert "second" not in done_well("reap", "--free", "2M", "--dry-run", "--volume", volume).out
    done_well("reap", "--free", "2M", "--volume", volume)
    assert left(volume, ids) == {"second", "later", "pinned"}


def test_what_can_be_restored_goes_by_a_yes_alone(volume: Path, ids: dict[str, str]) -> None:
    done = trashd("reap", "--free", "8M", "--volume", volume)
    assert done.code == 3
    assert ids["later"] in done.err
    assert left(volume, ids) == set(ids)
    for answer, code, there in (("n\n", 3, set(ids)), ("y\n", 0, {"pinned"})):
        terminal = Terminal("reap", "--free", "8M", "--volume", volume)
        terminal.wait_for("Permanently delete this orphan before it expires?")
        terminal.type(answer)
        assert (terminal.end(), left(volume, ids)) == (code, there), terminal.output


def test_what_is_pinned_never_goes_so(volume: Path, ids: dict[str, str]) -> None:
    done = trashd("reap", "--free", "11M", "--yes", "--volume", volume)
    assert done.code == 13, done
    assert "nothing was deleted" in done.err
    assert left(volume, ids) == set(ids)
    assert trashd("reap", "--free", "1M", "--all", "--volume", volume).code == 2
    done_well("reap", "--free", "8M", "--yes", "--json", "--volume", volume)
    assert left(volume, ids) == {"pinned"}


SILENT_S = 0.5
"""A neighbour who says nothing for longer need not be heard: far less than a reap takes at its rate."""


@contextmanager
def fsyncing(root: Path) -> Iterator[Callable[[], float]]:
    """A process that writes and fsyncs all the time; it has begun when the `with` does.

    Yields  for how many seconds it was silent at most: a busy machine keeps it waiting too
    """
    fd = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
    has_begun, ends = threading.Event(), threading.Event()
    longest_s = 0.0

    def work() -> None:
        nonlocal longest_s
        spoke_s = time.monotonic()
        while not ends.is_set():
            # Always the same block: however long it takes, it never fills the volume.
            os.pwrite(fd, bytes(4096), 0)
            os.fdatasync(fd)
            now_s = time.monotonic()
            longest_s, spoke_s = max(longest_s, now_s - spoke_s), now_s
            has_begun.set()

    neighbour = threading.Thread(target=work)
    neighbour.start()
    has_begun.wait()
    try:
        yield lambda: longest_s
    finally:
        ends.set()
        neighbour.join()
        os.close(fd)


def test_it_says_to_whom_it_yields_and_comes_to_its_end() -> None:
    with loop_volume("ext4", 256) as root:
        done_well("init", root)
        says_so, silent_s = False, math.inf
        while not says_so and silent_s > SILENT_S:
            identifier = str(swapped(fill(root / "victim", 600))["id"])
            with fsyncing(root) as longest_s:
                done = done_well("reap", "--now", "--paced", "--max-rate", "200", "--volume", root, identifier)
                says_so, silent_s = "trashd: yielding: " in done.err, longest_s()
            assert done.out.startswith(f"{identifier}: 601 entries removed")
        assert says_so
