"""The service's timers in tests: pauses are a tenth, limits what they are, as a busy machine may need them."""

from fusefs.service.timers import ServiceTimers

REAL = ServiceTimers()
_WAITED_FOR = (
    "find_pause_s", "session_pause_s", "around_pause_s", "around_least_pause_s", "space_pause_s", "linger_pause_s",
    "registries_pause_s", "status_pause_s", "node_poll_pause_s", "retry_pause_s", "child_pause_s", "tend_pause_s",
    "unread_pause_s", "patience_s", "silent_limit_s",
)  # fmt: skip
SCALED = REAL._replace(
    **{name: getattr(REAL, name) / 10 for name in _WAITED_FOR},
    registries_pauses=2,
    node_beat_pause_s=0.3,
    doubt_pauses_s=tuple(pause_s / 10 for pause_s in REAL.doubt_pauses_s),
)
"""What tests wait for. A volume that failed rests as long as ever: tests see it rest, and end that by a reload."""
