"""What the service writes for others: its audit log, and metrics as a Prometheus reads them."""

import json
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from fusefs.core.events import Event, EventKind
from fusefs.core.service_status import HeldByUser, HookCounts, SeenNode, Status, VolumePhase, VolumeStatus
from fusefs.linux.user_ids import Subordinates, SubuidRange
from fusefs.service.event_outlets import Audit, EventLimit, log_event
from fusefs.service.metrics import PrometheusMetrics, serve_metrics
from tests.support.real_filesystems import full
from tests.unit.test_events import EVENTS


def audit(path: Path) -> closing[Audit]:
    return closing(Audit(os.fsencode(path)))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def reaped(n: int) -> Event:
    return Event(EventKind.REAPED, 0, b"/v", 1000, "id", b"/v/job", n_entries=n)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@given(st.lists(EVENTS, max_size=5))
def test_each_event_is_a_line(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit.log"
    with audit(path) as write:
        for event in events:
            write(event)
    assert [line["event"] for line in lines(path)] == [event.kind.value for event in events]


def test_a_service_goes_on_where_the_last_one_stopped(log: Path) -> None:
    for n in (1, 2):
        with audit(log) as write:
            write(reaped(n))
    assert [line["n_entries"] for line in lines(log)] == [1, 2]


@pytest.mark.allows_warnings
def test_a_log_that_cannot_be_opened_anew_is_used_on(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    with audit(log) as write:
        log.rename(log.with_suffix(".1"))
        log.mkdir()
        write.reopen()
        write(reaped(1))
    assert len(lines(log.with_suffix(".1"))) == 1
    assert "can't be reopened" in caplog.text


def test_what_a_death_cut_is_not_continued(log: Path) -> None:
    log.write_bytes(b'{"event": "rea')
    with audit(log) as write:
        write(reaped(1))
    cut, whole = log.read_bytes().splitlines()
    assert cut == b'{"event": "rea'
    assert json.loads(whole)["n_entries"] == 1


def test_the_log_is_made_with_its_directory_and_not_for_everybody(tmp_path: Path) -> None:
    with audit(tmp_path / "a" / "b" / "audit.log"):
        assert (tmp_path / "a" / "b" / "audit.log").stat().st_mode & 0o007 == 0


@pytest.mark.parametrize("make", [lambda log: log.symlink_to("elsewhere"), os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(log: Path, make: Callable[[Path], object]) -> None:
    make(log)
    with pytest.raises(OSError, match="audit"):
        Audit(os.fsencode(log))
    assert not log.with_name("elsewhere").exists()


@pytest.mark.needs("root")
@pytest.mark.allows_warnings
def test_a_full_disk_costs_lines_and_is_told_once(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = volume / "audit.log"
    with audit(log) as write:
        write(reaped(0))
        with full(volume, inodes=False):
            for n in range(1, 100):
                write(reaped(n))
        write(reaped(100))
    whole, cut = [], []
    for line in log.read_bytes().splitlines():
        try:
            whole.append(json.loads(line)["n_entries"])
        except ValueError:
            cut.append(line)
    assert whole == [*range(len(whole) - 1), 100]
    assert len(cut) <= 1
    told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _text in told] == [logging.ERROR, logging.WARNING]
    assert f"{100 - len(whole) + 1} events are missing from it" in told[1][1]


@pytest.mark.allows_warnings
@pytest.mark.parametrize(
    ("kind", "level"),
    [(EventKind.REAPED, logging.INFO), (EventKind.QUARANTINED, logging.WARNING), (EventKind.BROKEN, logging.ERROR)],
)
def test_an_event_is_logged_by_its_weight(kind: EventKind, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_event(Event(kind, 0, b"/v", origin=b"/v/\x1b[2J"))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().isprintable()
    assert vars(record)["fields"]["TRASHD_EVENT"] == kind.value.encode()


MOST = 1000


def test_what_one_user_does_is_bounded_and_others_are_not() -> None:
    flood = EventLimit()
    told = [flood.lets_pass(1001, 100.0) for _ in range(3 * MOST)]
    assert sum(told) == MOST
    assert flood.lets_pass(1002, 100.0)


def test_subordinate_uids_are_their_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    subordinates = Subordinates([SubuidRange(200_000, 65_536, 1001)])
    monkeypatch.setattr("fusefs.service.event_outlets.read_subordinates", lambda: subordinates)
    flood = EventLimit()
    assert sum(flood.lets_pass(200_000 + n, 100.0) for n in range(3 * MOST)) == MOST
    assert flood.lets_pass(1002, 100.0)


@pytest.mark.allows_warnings
def test_what_was_not_told_is_told_as_a_number(caplog: pytest.LogCaptureFixture) -> None:
    flood = EventLimit()
    for _ in range(MOST + 7):
        flood.lets_pass(1001, 100.0)
    with caplog.at_level(logging.WARNING):
        assert flood.lets_pass(1001, 200.0)
    assert "7 more events" in caplog.text


DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
UNITS = re.compile(r"_(seconds|bytes|ratio|per_second|total|orphans|users|inodes|info|phase|nodes)$")
VOLUME = VolumeStatus(
    path="/v", phase=VolumePhase.YIELDING, n_users=2, n_orphans=5, n_due=3, n_quarantined=1,
    tempo_entries_per_s=100, io=0.25,
    memory=0.0, cpu=0.5, probe_ms=2.0, unlink_us=20.0, eta_s=60.0, oldest_overdue_s=7.0, free_bytes=10, total_bytes=100,
    free_inodes=4, total_inodes=8, removed_entries=1000, freed_bytes=4096, n_reaped=9,
    held=(HeldByUser(0, 5000, 0), HeldByUser(1000, 2000, 2)),
)  # fmt: skip
SOME = Status(version="0.1", pid=1, boot_id="b", started_ns=10**9, updated_ns=2 * 10**9, volumes=(VOLUME,))
NO_HOOKS = HookCounts()


def read(path: Path) -> dict[str, Metric]:
    """The metrics of a text file by their names, counters with their ending."""
    families = text_string_to_metric_families(path.read_text(encoding="utf-8"))
    return {family.name + "_total" * (family.type == "counter"): family for family in families}


def value(metric: Metric, **labels: str) -> float:
    (sample,) = (sample for sample in metric.samples if sample.labels == labels)
    return sample.value


def publish(
    path: Path, status: Status = SOME, tally: HookCounts = NO_HOOKS, events: tuple[Event, ...] = ()
) -> dict[str, Metric]:
    metrics = PrometheusMetrics(os.fsencode(path))
    for event in events:
        metrics(event)
    metrics.publish(status, tally)
    return read(path)


@pytest.fixture
def textfile(tmp_path: Path) -> Path:
    return tmp_path / "trashd.prom"


def test_a_volumes_values_have_base_units(textfile: Path) -> None:
    told = publish(textfile)
    with_volume = {
        name: metric for name, metric in told.items() if [one.labels for one in metric.samples] == [{"volume": "/v"}]
    }
    values = {name: value(metric, volume="/v") for name, metric in with_volume.items()}
    assert values == {
        "trashd_users": 2, "trashd_orphans": 5, "trashd_due_orphans": 3, "trashd_quarantined_orphans": 1,
        "trashd_held_bytes": 7000, "trashd_unsized_orphans": 2,
        "trashd_tempo_entries_per_second": 100, "trashd_probe_seconds": 0.002, "trashd_unlink_seconds": 0.00002,
        "trashd_eta_seconds": 60, "trashd_overdue_seconds": 7, "trashd_free_bytes": 10, "trashd_size_bytes": 100,
        "trashd_free_inodes": 4, "trashd_inodes": 8, "trashd_removed_entries_total": 1000,
        "trashd_freed_bytes_total": 4096, "trashd_reaped_orphans_total": 9,
    }  # fmt: skip


def test_every_metric_has_a_help_and_a_unit(textfile: Path) -> None:
    told = publish(textfile, events=(Event(EventKind.REAPED, 0, b"/v"),))
    assert len(told) > 20
    assert [name for name in told if not name.startswith("trashd_") or not UNITS.search(name)] == []
    assert [name for name, metric in told.items() if not metric.documentation.endswith(".")] == []


def test_what_is_not_known_is_absent(textfile: Path) -> None:
    told = publish(textfile, replace(SOME, volumes=(VolumeStatus(path="/v"),)))
    assert told["trashd_probe_seconds"].samples == told["trashd_stall_ratio"].samples == []
    assert value(told["trashd_tempo_entries_per_second"], volume="/v") == math.inf


def test_one_phase_is_true(textfile: Path) -> None:
    phases = publish(textfile)["trashd_phase"].samples
    assert {sample.labels["phase"] for sample in phases} == {phase.value for phase in VolumePhase}
    assert [sample.labels["phase"] for sample in phases if sample.value] == ["yielding"]


def test_stalls_are_told_by_resource(textfile: Path) -> None:
    told = publish(textfile)["trashd_stall_ratio"]
    assert {name: value(told, volume="/v", resource=name) for name in ("io", "memory", "cpu")} == {
        "io": 0.25, "memory": 0.0, "cpu": 0.5,
    }  # fmt: skip


NODE = SeenNode(
    host="alpha", boot_id="1", is_here=True, is_alive=True, unchanged_s=0.0, version="0.1", phase="idle", probe_ms=None
)


def with_nodes(*nodes: SeenNode) -> Status:
    (volume,) = SOME.volumes
    return replace(SOME, host="alpha", volumes=(replace(volume, nodes=nodes),))


def test_a_service_tells_its_host(textfile: Path) -> None:
    assert value(publish(textfile, with_nodes())["trashd_info"], version="0.1", host="alpha") == 1


def test_nodes_that_live_are_counted_and_others_silence_is_told(textfile: Path) -> None:
    beta = replace(NODE, host="beta", is_here=False, unchanged_s=12.0)
    gamma = replace(NODE, host="gamma", is_here=False, is_alive=False, unchanged_s=500.0)
    told = publish(textfile, with_nodes(NODE, beta, gamma))
    assert value(told["trashd_nodes"], volume="/v") == 2
    silent = told["trashd_node_silent_seconds"]
    assert {host: value(silent, volume="/v", host=host) for host in ("beta", "gamma")} == {"beta": 12, "gamma": 500}
    assert len(silent.samples) == 2


def test_a_node_that_was_started_again_is_not_silent_for_its_last_boot(textfile: Path) -> None:
    boots = [
        replace(NODE, host="beta", boot_id=boot, is_here=False, unchanged_s=s) for boot, s in (("1", 9e4), ("2", 1.0))
    ]
    told = publish(textfile, with_nodes(NODE, *boots))["trashd_node_silent_seconds"]
    assert value(told, volume="/v", host="beta") == 1


def test_events_are_counted_by_volume_and_kind(textfile: Path) -> None:
    events = (Event(EventKind.REAPED, 0, b"/v"), Event(EventKind.REAPED, 0, b"/v"), Event(EventKind.STARTED, 0))
    told = publish(textfile, events=events)["trashd_events_total"]
    assert value(told, volume="/v", event="reaped") == 2
    assert value(told, volume="", event="started") == 1


def test_hooks_are_counted(textfile: Path) -> None:
    told = publish(textfile, tally=HookCounts(5, 2, 1))
    names = ("trashd_hooks_total", "trashd_failed_hooks_total", "trashd_dropped_hooks_total")
    assert [value(told[name]) for name in names] == [5, 2, 1]


def test_the_file_is_readable_for_the_exporter_whatever_the_umask(textfile: Path) -> None:
    before = os.umask(0o077)
    try:
        publish(textfile)
    finally:
        os.umask(before)
    assert textfile.stat().st_mode & 0o777 == 0o644
    assert list(textfile.parent.iterdir()) == [textfile]


@pytest.mark.allows_warnings
def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = PrometheusMetrics(os.fsencode(tmp_path / "missing" / "trashd.prom"))
    metrics.publish(SOME, HookCounts())
    metrics.publish(SOME, HookCounts())
    (record,) = caplog.records
    assert "No such file" in record.getMessage()


@pytest.mark.allows_warnings
@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o755), (0, 0o1777), (0, 0o775)])
@pytest.mark.needs("root")
def test_no_file_is_written_where_others_can_write(
    textfile: Path, owner: int, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(f"{textfile}.new")
    textfile.parent.chmod(mode)
    os.chown(textfile.parent, owner, -1)
    metrics = PrometheusMetrics(os.fsencode(textfile))
    metrics.publish(SOME, HookCounts())
    metrics.close()
    (record,) = caplog.records
    assert "can't be written: other users can write to its directory" in record.getMessage()
    assert os.listdir(textfile.parent) == ["trashd.prom.new"]


def test_a_pipe_in_the_place_of_the_unfinished_file_holds_nobody_up(textfile: Path) -> None:
    os.mkfifo(f"{textfile}.new")
    assert "trashd_orphans" in publish(textfile)
    assert list(textfile.parent.iterdir()) == [textfile]


def served(act: Callable[[int], Awaitable[None]]) -> None:
    """Do something with the port on which metrics are served; the service lives at the end.

    Its time stands still: a client that a busy machine keeps waiting is not slow.
    """

    async def main() -> None:
        metrics = PrometheusMetrics()
        metrics.publish(SOME, HookCounts())
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(serve_metrics, "127.0.0.1", 0, metrics.text)
            port: int = listener.socket.getsockname()[1]
            await act(port)
            assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock())


async def ask(port: int, request: bytes) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        await stream.send_eof()
        answer = b""
        while part := await stream.receive_some(1 << 16):
            answer += part
        return answer


def test_metrics_are_served() -> None:
    async def act(port: int) -> None:
        head, _, body = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"Content-Length: %d" % len(body) in head
        families = {family.name for family in text_string_to_metric_families(body.decode())}
        assert "trashd_orphans" in families

    served(act)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /secret HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics?x=1 HTTP/1.0\r\nAccept: text/plain; version=abc\r\n\r\n", b"200"),
        (b"HEAD / HTTP/1.1\r\n\r\n", b"200"),
        (b"\xff\x00\r\n\r\n", b"400"),
        (b"x" * 8192, b"400"),
        (b"", b"400"),
    ],
    ids=["path", "method", "odd but right", "head", "noise", "endless", "nothing"],
)
def test_any_request_has_an_answer(request_: bytes, status: bytes) -> None:
    async def act(port: int) -> None:
        assert (await ask(port, request_)).startswith(b"HTTP/1.1 " + status)

    served(act)


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_silent_connections_keep_no_scrape_from_its_answer(said: bytes) -> None:
    """The oldest is closed, and the latest is still heard."""

    async def act(port: int) -> None:
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(100)]
        for stream in silent:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(said)
        with suppress(trio.BrokenResourceError):
            assert await silent[0].receive_some(1) == b""
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        await silent[-1].send_all(b"GET /metrics HTTP/1.1\r\n\r\n"[len(said) :])
        assert await silent[-1].receive_some(12) == b"HTTP/1.1 200"
        for stream in silent:
            await stream.aclose()

    served(act)


def test_who_goes_away_early_ends_nothing() -> None:
    async def act(port: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        linger = (1).to_bytes(4, "little") + bytes(4)
        stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger)
        await stream.send_all(b"GET /metrics HTTP/1.1\r\n")
        await stream.aclose()

    served(act)


@pytest.mark.allows_warnings
def test_a_port_that_is_taken_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with trio.socket.socket() as taken:
            await taken.bind(("127.0.0.1", 0))
            taken.listen()
            await serve_metrics("127.0.0.1", taken.getsockname()[1], PrometheusMetrics().text)

    trio.run(main)
    (record,) = caplog.records
    assert "can't listen" in record.getMessage()


def names_of(text: str) -> set[str]:
    return set(re.findall(r"\btrashd_[a-z_]+[a-z]\b", text))


def test_dashboard_and_rules_know_only_metrics_that_are(textfile: Path) -> None:
    known_names = set(publish(textfile))
    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    used = {name for target in targets for name in names_of(target["expr"])}
    assert len(used) > 10
    assert used <= known_names
    rules = (DOCS / "alert-rules.yml").read_text(encoding="utf-8")
    assert names_of(rules)
    reference = (DOCS / "reference/metrics-and-events.md").read_text(encoding="utf-8")
    names_of_mounts = set(re.findall(r"^\| `(trashd_mount_\w+)`", reference, re.MULTILINE))
    assert names_of(rules) <= known_names | names_of_mounts


def test_every_metric_is_documented(textfile: Path) -> None:
    told = (DOCS / "reference/metrics-and-events.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(trashd_(?!mount_)\w+)`", told, re.MULTILINE)
    assert sorted(documented) == sorted(publish(textfile))


def test_the_dashboards_variable_is_a_label_of_ours() -> None:
    (volume,) = (variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query")
    assert volume["query"] == "label_values(trashd_orphans, volume)"
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert all('volume=~"$volume"' in expression or "volume" not in expression for expression in expressions)


def test_the_journals_fields_are_documented() -> None:
    from fusefs.core.events import to_variables

    text = (DOCS / "reference/metrics-and-events.md").read_text(encoding="utf-8")
    assert [name for name in to_variables(Event(EventKind.STARTED, 0)) if f"`{name}`" not in text] == []
    assert [kind.value for kind in EventKind if f"`{kind.value}`" not in text] == []
