"""Prometheus metrics of mounts. They are totals, since Prometheus itself computes rates over any period."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fusefs.core.mount_counters import ObservedMount, Operation
from fusefs.core.printable_names import printable

_GAUGES = {
    "n_nodes": ("trashd_mount_nodes", "Inodes that the kernel knows, or that are open."),
    "n_handles": ("trashd_mount_handles", "Open files and directory listings."),
    "n_directory_fds": ("trashd_mount_directory_fds", "Directories that the daemon holds open."),
    "n_cached": ("trashd_mount_cached_items", "Inodes in the daemon's cache."),
    "cache_bytes": ("trashd_mount_cache_bytes", "Memory that the cache uses."),
    "cache_size_bytes": ("trashd_mount_cache_size_bytes", "Memory that the cache may use."),
    "n_threads": ("trashd_mount_threads", "Threads that are working on requests."),
    "n_prefetches": ("trashd_mount_prefetches", "Names whose attributes are being prefetched."),
    "is_slow": ("trashd_mount_slow", "Whether the backing filesystem is treated as slow."),
}


def prometheus_text(mounts: Sequence[ObservedMount]) -> str:
    """Return the metrics of several mounts in Prometheus's text format. The label `mount` distinguishes them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MountCollector(mounts))
    return generate_latest(registry).decode()


class _MountCollector(Collector):
    def __init__(self, mounts: Sequence[ObservedMount]) -> None:
        self._mounts = {printable(mount.point): mount for mount in mounts}

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("trashd_mount_info", "The mount's labels.", labels=["mount", "source", "version"])
        up = GaugeMetricFamily("trashd_mount_up", "Whether the mount's daemon is running.", labels=["mount"])
        started = GaugeMetricFamily(
            "trashd_mount_start_time_seconds", "When the mount's daemon started (Unix time).", labels=["mount"]
        )
        for name, (_point, source, stats, is_running, _) in self._mounts.items():
            info.add_metric([name, printable(source), stats.table.version], 1)
            up.add_metric([name], float(is_running))
            started.add_metric([name], stats.table.started_ns / 1e9)
        yield from (info, up, started)
        for key, (metric, help_) in _GAUGES.items():
            gauge = GaugeMetricFamily(metric, help_, labels=["mount"])
            for name, mount in self._mounts.items():
                if key in mount.stats.gauges:
                    gauge.add_metric([name], mount.stats.gauges[key])
            yield gauge
        yield from self._cache_metrics()
        yield from self._operation_metrics()

    def _cache_metrics(self) -> Iterator[Metric]:
        labels = ["mount", "kind"]
        hits = CounterMetricFamily("trashd_mount_hits_total", "Cache hits.", labels=labels)
        misses = CounterMetricFamily("trashd_mount_misses_total", "Cache misses.", labels=labels)
        for name, mount in self._mounts.items():
            for kind, remembered in mount.stats.remembered.items():
                hits.add_metric([name, kind], remembered.n_hits)
                misses.add_metric([name, kind], remembered.n_misses)
        yield from (hits, misses)

    def _operation_metrics(self) -> Iterator[Metric]:
        labels = ["mount", "operation"]
        failed = CounterMetricFamily("trashd_mount_errors_total", "Requests that failed.", labels=labels)
        durations = HistogramMetricFamily("trashd_mount_operation_seconds", "Duration of requests.", labels=labels)
        for name, mount in self._mounts.items():
            for operation_name, operation in mount.stats.operations.items():
                if operation.n():
                    failed.add_metric([name, operation_name], operation.n_failed)
                    durations.add_metric(
                        [name, operation_name], _buckets(operation), sum_value=operation.total_ns / 1e9
                    )
        yield from (failed, durations)


def _buckets(operation: Operation) -> list[tuple[str, float]]:
    ends = [repr(bound / 1e9) for bound in operation.bounds_ns]
    return list(zip([*ends, "+Inf"], map(float, accumulate(operation.counts)), strict=True))
