"""Metrics over HTTP for a Prometheus on this host: no thread, and no wake-up without a request.

prometheus_client has a server of its own; it looks twice a second whether it should end.
"""

from __future__ import annotations

import logging
from functools import partial

import trio
from prometheus_client import CollectorRegistry, generate_latest

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 5.0
_REQUEST_MAX = 8192
_AT_ONCE = 8
_PATHS = (b"/", b"/metrics")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""prometheus_client has a name for it since 0.22 (Debian 13 has 0.21)."""


async def serve(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer GET /metrics until cancelled. An address that can't be had is logged, and nothing served."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        _LOG.error("metrics: can't listen on %s port %d: %s", host, port, error)
        task_status.started([])
        return
    limit = trio.CapacityLimiter(_AT_ONCE)
    await trio.serve_listeners(partial(_answer, registry, limit), listeners, task_status=task_status)


async def _answer(registry: CollectorRegistry, limit: trio.CapacityLimiter, stream: trio.SocketStream) -> None:
    """One request, one answer; a slow client, or one of too many, is disconnected."""
    async with stream:
        try:
            limit.acquire_nowait()
        except trio.WouldBlock:
            return
        try:
            with trio.move_on_after(_PATIENCE_S):
                await stream.send_all(_respond(registry, await _read(stream)))
        except trio.BrokenResourceError:
            return
        finally:
            limit.release()


async def _read(stream: trio.SocketStream) -> bytes:
    """A request's head; what came of it if it ends early."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _REQUEST_MAX:
        part = await stream.receive_some(_REQUEST_MAX)
        if not part:
            break
        head += part
    return head


def _respond(registry: CollectorRegistry, head: bytes) -> bytes:
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3:
        return _response("400 Bad Request")
    method, path, _version = words
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed")
    if path.partition(b"?")[0] not in _PATHS:
        return _response("404 Not Found")
    return _response("200 OK", generate_latest(registry), is_told=method == b"GET")


def _response(status: str, body: bytes = b"", *, is_told: bool = True) -> bytes:
    """All that is ever told has the oldest format, which every Prometheus knows: what it accepts needs no reading."""
    head = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {_CONTENT_TYPE}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join([*head, "", ""]).encode("ascii") + (body if is_told else b"")
