"""Metrics of mounts for Prometheus: totals only, as Prometheus computes rates over any period itself."""

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
    "n_cached": ("trashd_mount_cached_items", "Entries in the cache of the daemon."),
    "cache_bytes": ("trashd_mount_cache_bytes", "Memory in use by the cache."),
    "cache_size_bytes": ("trashd_mount_cache_size_bytes", "Maximum memory of the cache."),
    "n_threads": ("trashd_mount_threads", "Threads that are working."),
    "n_prefetches": ("trashd_mount_prefetches", "Attributes that are being prefetched."),
    "is_slow": ("trashd_mount_slow", "Whether the backing filesystem is treated as slow."),
}


def prometheus_text(mounts: Sequence[ObservedMount]) -> str:
    """Return the metrics of several mounts in the text format, distinguished by the label `mount`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MountCollector(mounts))
    return generate_latest(registry).decode()


class _MountCollector(Collector):
    def __init__(self, mounts: Sequence[ObservedMount]) -> None:
        self._mounts = {printable(mount.point): mount for mount in mounts}

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("trashd_mount_info", "The mount.", labels=["mount", "source", "version"])
        up = GaugeMetricFamily("trashd_mount_up", "Whether the daemon of the mount is running.", labels=["mount"])
        started = GaugeMetricFamily(
            "trashd_mount_start_time_seconds", "When the daemon of the mount started.", labels=["mount"]
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
        failed = CounterMetricFamily("trashd_mount_errors_total", "Replies with an error.", labels=labels)
        durations = HistogramMetricFamily("trashd_mount_operation_seconds", "Duration of operations.", labels=labels)
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
