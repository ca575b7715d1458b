"""The outlets of events and figures: log, audit log, hooks, metrics; as the configuration says, which may change."""

from __future__ import annotations

import logging
import os

import trio

from fusefs.core.config import Config
from fusefs.core.config import MetricsConfig as Wanted
from fusefs.core.events import Event
from fusefs.core.service_status import Status
from fusefs.service.audit_log import Audit, log_event
from fusefs.service.hooks import HookRunner
from fusefs.service.prometheus import PrometheusMetrics

_LOG = logging.getLogger(__name__)


class EventOutlets:
    """All of them; events may come before they are run."""

    def __init__(self, config: Config) -> None:
        self._hooks = HookRunner(config.hooks)
        self._audit = _open_audit(config)
        self._audit_path = config.audit
        self._metrics: PrometheusMetrics | None = None
        self._wanted = Wanted()
        self._listening = trio.CancelScope()

    def tell(self, event: Event, *, is_own: bool) -> None:
        """Report an event to all outlets. is_own: it happened in a store of its user's own"""
        log_event(event)
        if self._audit is not None:
            self._audit(event)
        self._hooks(event)
        if self._metrics is not None:
            self._metrics(event, is_own=is_own)

    def publish(self, status: Status) -> None:
        """These are the figures now."""
        if self._metrics is not None:
            self._metrics.publish(status, self._hooks.tally())

    def run(self, config: Config, nursery: trio.Nursery) -> None:
        """Work in a nursery until that is cancelled."""
        nursery.start_soon(self._hooks.run)
        self._serve_metrics(config.metrics, nursery)

    def configure(self, config: Config, nursery: trio.Nursery) -> None:
        """Go on as another configuration says. The audit log is opened anew: it may have been renamed."""
        self._hooks.configure(config.hooks)
        self._serve_metrics(config.metrics, nursery)
        if config.audit == self._audit_path and self._audit is not None:
            self._audit.reopen()
            return
        if self._audit is not None:
            self._audit.close()
        self._audit, self._audit_path = _open_audit(config), config.audit

    def close(self) -> None:
        """Nothing more is told."""
        if self._metrics is not None:
            self._metrics.close()
        if self._audit is not None:
            self._audit.close()

    def _serve_metrics(self, wanted: Wanted, nursery: trio.Nursery) -> None:
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._listening.cancel()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if wanted.textfile is None and wanted.http is None:
            return
        from fusefs.service.prometheus import PrometheusMetrics

        self._metrics = PrometheusMetrics(None if wanted.textfile is None else os.fsencode(wanted.textfile))
        if wanted.http is not None:
            self._listening = trio.CancelScope()
            nursery.start_soon(_answer, *wanted.http, self._metrics, self._listening)


async def _answer(host: str, port: int, metrics: PrometheusMetrics, listening: trio.CancelScope) -> None:
    from fusefs.service.metrics_http import serve

    with listening:
        await serve(host, port, metrics.registry)


def _open_audit(config: Config) -> Audit | None:
    if config.audit is None:
        return None
    try:
        return Audit(os.fsencode(config.audit))
    except OSError as error:
        _LOG.error("no audit log: %s: %s", config.audit, error.strerror)
        return None
