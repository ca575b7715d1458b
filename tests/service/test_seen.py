"""What a running service lets others see of its work: audit log, hooks, metrics, status, and no more than that."""

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from tests.support.make_trees import IMMUTABLE, Dir, make_tree, set_flags
from tests.support.other_users import as_user
from tests.support.service_process import Service, events_in, objects_in, places, service
from tests.support.small_orphans import EXPIRED, OTHER, orphan_in
from tests.support.store_verbs import swap
from tests.support.trashd_command import trashd

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]
EVIL = "plans\n\x1b[2J"


class Watched(NamedTuple):
    """A service that reports by all outlets, its files and its port."""

    service: Service
    base: Path
    address: str

    def audited(self, event: str) -> list[dict[str, object]]:
        return [line for line in events_in(self.base) if line["event"] == event]

    def hooked(self) -> list[dict[str, object]]:
        path = self.base / "hooked"
        return objects_in(path) if path.exists() else []

    def textfile(self) -> str:
        path = self.base / "trashd.prom"
        return path.read_text() if path.exists() else ""

    def asked(self) -> str:
        """What Prometheus gets; nothing if it was hung up on, or no process listens yet."""
        text = ""
        with suppress(OSError), urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return text


@pytest.fixture
def watched(volume: Path) -> Iterator[Watched]:
    address = free_address()
    with places() as base:
        hook = json.dumps(["/bin/sh", "-c", f"cat >> {base}/hooked"])
        config = f"""
[hooks]
user = "root"
on_swap = {hook}
on_reaped = {hook}
on_quarantine = {hook}
[metrics]
textfile = "{base}/trashd.prom"
http = "{address}"
allow_remote = true  # as which all but 127.0.0.1 counts
"""
        make_tree(volume / "home", Dir({}, owner=(OTHER, OTHER)))
        orphan_in(volume, "before")
        orphan_of_his(volume, "before")
        with service(base, volume, config=config) as running:
            wait_until_known(running, volume, 2)
            yield Watched(running, base, address)


def orphan_of_his(volume: Path, name: str, options: SwapOptions | None = None) -> Swapped:
    make_tree(volume / "home" / name, Dir({"a": "1"}, owner=(OTHER, OTHER)))
    return as_user(OTHER, partial(swap, volume / "home" / name, None, options or SwapOptions()))


def wait_until_known(running: Service, volume: Path, n_orphans: int) -> None:
    """Wait until the service has looked at what was there before it, and watches."""
    running.until(running.read_status)
    running.until(lambda: running.volume(volume).n_orphans == n_orphans)


def free_address() -> str:
    """A host and port where no process listens; on 127.0.0.1 one might, by the time that it is used."""
    pid = os.getpid()
    host = f"127.{pid >> 16}.{pid >> 8 & 255}.{pid & 255}"
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"


def test_a_users_swap_and_its_reap_are_audited_and_hooked(volume: Path, watched: Watched) -> None:
    gone = orphan_of_his(volume, "job", EXPIRED)
    watched.service.until(lambda: len(watched.hooked()) == 2)
    (swapped,), (reaped,) = watched.audited("swapped"), watched.audited("reaped")
    # Two hooks run side by side: whose line comes first is theirs to say.
    assert sorted(watched.hooked(), key=lambda line: str(line["at_ns"])) == [swapped, reaped]
    for line in (swapped, reaped):
        assert (line["id"], line["uid"], line["origin"]) == (gone.id, OTHER, os.fsdecode(gone.path))
        assert line["volume"] == str(volume)
    assert reaped["n_entries"] == 2


@pytest.mark.parametrize("words", [("rm",), ("swap",)])
def test_each_way_into_the_store_has_its_word(volume: Path, watched: Watched, words: tuple[str, ...]) -> None:
    trashd(*words, make_tree(volume / "job", {"a": "1"}))
    event = {"rm": "removed", "swap": "swapped"}[words[0]]
    watched.service.until(lambda: watched.audited(event))
    assert "reaped" not in (watched.base / "audit").read_text()


@pytest.mark.allows_warnings
def test_what_cannot_be_removed_is_audited_hooked_and_counted(volume: Path, watched: Watched) -> None:
    job = make_tree(volume / "job", {"file": "content"})
    set_flags(job / "file", IMMUTABLE)
    assert trashd("swap", "--keep-for", "0s", job).code == 0
    watched.service.until(lambda: any(line["event"] == "quarantined" for line in watched.hooked()))
    watched.service.until(lambda: f'trashd_quarantined_orphans{{volume="{volume}"}} 1.0' in watched.asked())
    (line,) = watched.audited("quarantined")
    trashd("reap", "--force", "--yes", "--volume", volume, str(line["id"]))


def test_metrics_count_what_was_reaped_in_file_and_answer(volume: Path, watched: Watched) -> None:
    orphan_in(volume, options=EXPIRED)
    reaped = f'trashd_reaped_orphans_total{{volume="{volume}"}} 1.0\n'
    text = f'trashd_events_total{{event="reaped",volume="{volume}"}} 1.0\n'
    watched.service.until(lambda: all(line in watched.asked() for line in (reaped, text)))
    watched.service.until(lambda: reaped in watched.textfile())


def test_a_stopped_service_leaves_its_last_word_and_no_values(watched: Watched) -> None:
    watched.service.until(watched.textfile)
    watched.service.stop()
    assert watched.textfile() == ""
    done = trashd("status")
    assert done.code == 5
    assert "the service is not running" in done.out
    assert watched.audited("stopped")


def test_a_rotated_audit_log_is_followed_after_a_reload(volume: Path, watched: Watched) -> None:
    (watched.base / "audit").rename(watched.base / "audit.1")
    watched.service.reload()
    orphan_in(volume)
    watched.service.until(lambda: (watched.base / "audit").exists() and watched.audited("swapped"))
    assert "swapped" not in (watched.base / "audit.1").read_text()


def test_the_status_is_for_all_and_names_nobodys_files_and_the_log_moves_no_cursor(
    volume: Path, watched: Watched
) -> None:
    orphan_in(volume, name=EVIL, options=EXPIRED)
    watched.service.until(lambda: watched.service.volume(volume).n_reaped == 1)
    text = Path(os.fsdecode(SYSTEM_RUNTIME), "status.json").read_text()
    assert "plans" not in text
    assert trashd("status").code == 0
    watched.service.until(lambda: "reaped " in watched.service.log.read_text())
    assert all(line.isprintable() for line in watched.service.log.read_text().splitlines())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_comes_back_counts_no_orphan_as_new(volume: Path, number: signal.Signals) -> None:
    orphan_in(volume, "before")
    with places() as base:
        with service(base, volume) as first:
            wait_until_known(first, volume, 1)
            watched = Watched(first, base, "")
            orphan_in(volume)
            first.until(lambda: watched.audited("swapped"))
            told_ns = watched.audited("swapped")[0]["at_ns"]
            first.until(lambda: json.loads((base / "clock.json").read_bytes())["wall_ns"] > told_ns)
            if number is signal.SIGKILL:
                first.kill()
            else:
                first.stop()
        with service(base, volume) as second:
            wait_until_known(second, volume, 2)
            second.reload()
        assert len(watched.audited("swapped")) == 1
        assert watched.audited("found") == []
