"""`trashd status --watch`: a live view of the service's status that fits the terminal."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fusefs.cli import status_text
from fusefs.core.errors import NotRunning
from fusefs.core.service_status import ObservedStatus, VolumePhase, VolumeStatus

FindServices = Callable[[], list[tuple[bytes, ObservedStatus]]]
_REFRESH_S = 1.0
_N_SAMPLES = 24
_BAR_CELLS = 4
_PANEL_LINES = 10
"""The height of a volume's panel in lines: a frame and eight rows."""
_STYLES = {
    VolumePhase.IDLE: "dim", VolumePhase.REAPING: "green", VolumePhase.YIELDING: "yellow",
    VolumePhase.HURRYING: "bold magenta",
    VolumePhase.PAUSED: "cyan", VolumePhase.BROKEN: "bold red", VolumePhase.GONE: "dim", VolumePhase.ELSEWHERE: "dim",
}  # fmt: skip
_RANKS = {
    VolumePhase.BROKEN: 0, VolumePhase.HURRYING: 1, VolumePhase.REAPING: 2, VolumePhase.YIELDING: 2,
    VolumePhase.LOOKING: 3, VolumePhase.IDLE: 5, VolumePhase.ELSEWHERE: 6, VolumePhase.GONE: 6,
}  # fmt: skip
_OTHER_RANK = 4
"""The rank of other phases. Volumes that the user should see first have the lowest ranks."""
_BAD_STALL, _BAD_FREE = 0.2, 0.1


def watch_live(find_services: FindServices) -> None:
    """Show the services, refreshed every second, until the user presses Ctrl-C."""
    console = Console()
    view = StatusView(is_ascii=not console.encoding.startswith("utf"))
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    services = find_services()
                except NotRunning:  # a service may start later
                    services = []
                live.update(view.draw(services, time.time_ns(), console.height), refresh=True)
                time.sleep(_REFRESH_S)
        except KeyboardInterrupt:
            return


class StatusView:
    """Draws the view, and remembers the rates of the last seconds."""

    def __init__(self, *, is_ascii: bool = False) -> None:
        """is_ascii: the terminal can show only ASCII characters."""
        self._rates: dict[tuple[bytes, str], deque[float]] = defaultdict(lambda: deque(maxlen=_N_SAMPLES))
        self._full, self._empty = "#." if is_ascii else "█░"
        self._levels = " .:-=+*#" if is_ascii else " ▁▂▃▄▅▆▇█"
        self._dot = "*" if is_ascii else "●"
        self._overflow: OverflowMethod = "crop" if is_ascii else "ellipsis"

    def draw(self, services: Sequence[tuple[bytes, ObservedStatus]], now_ns: int, n_lines: int) -> RenderableType:
        """Draw the view, at most `n_lines` high."""
        head: list[RenderableType] = [_head(service, now_ns) for _directory, service in services]
        head += [Text(text, "bold red") for _, service in services if (text := status_text.trouble(service))]
        if not services:
            head.append(Text.assemble(("No reaper service is running. ", "bold red"), NotRunning.hint))
        volumes = [(directory, volume) for directory, service in services for volume in service.status.volumes]
        for directory, volume in volumes:
            self._rates[directory, volume.path].append(volume.entries_per_s)
        volumes.sort(key=lambda pair: _RANKS.get(pair[1].phase, _OTHER_RANK))  # equal ranks keep their order
        n_free = n_lines - len(head)
        # Draw as many panels as leave a line for each other volume, but at least one panel if it fits.
        n_panels = (n_free - len(volumes)) // (_PANEL_LINES - 1)
        n_panels = min(len(volumes), max(n_panels, int(n_free >= _PANEL_LINES + (len(volumes) > 1))))
        n_free -= n_panels * _PANEL_LINES
        briefs = volumes[n_panels:]
        n_briefs = len(briefs) if len(briefs) <= n_free else max(n_free - 1, 0)
        body: list[RenderableType] = [self._panel(directory, one, now_ns) for directory, one in volumes[:n_panels]]
        body += [self._brief(one, now_ns) for _directory, one in briefs[:n_briefs]]
        if n_briefs < len(briefs):
            body.append(Text(f"and {len(briefs) - n_briefs} more volumes (trashd status)", "dim"))
        return Group(*head, *body)

    def _panel(self, directory: bytes, volume: VolumeStatus, now_ns: int) -> Panel:
        rate = status_text.rate(volume) if status_text.is_busy(volume) else "-"
        size = status_text.held(volume)
        backlog = status_text.backlog(volume, now_ns) + (f", {size}" if size else "")
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(width=8, style="dim")
        rows.add_column(ratio=1, no_wrap=True, overflow=self._overflow)
        for name, text in (
            ("state", self._with_dot(volume, status_text.doing(volume))),
            ("backlog", Text(backlog)),
            ("rate", Text.assemble((self._spark(self._rates[directory, volume.path]), "green"), " ", rate)),
            ("pressure", self._pressure(volume)),
            ("free", self._free(volume)),
            ("now", Text(status_text.now(volume) or "-")),
            ("eta", Text(status_text.eta(volume) or "-")),
            ("errors", _errors(volume, now_ns)),
        ):
            text.no_wrap, text.overflow = True, self._overflow
            rows.add_row(name, text)
        heading = Text(status_text.heading(volume), "bold")
        heading.truncate(60, overflow=self._overflow)
        return Panel(
            rows, title=heading, title_align="left", border_style=_STYLES.get(volume.phase, ""), height=_PANEL_LINES
        )

    def _brief(self, volume: VolumeStatus, now_ns: int) -> Text:
        parts = (status_text.heading(volume), status_text.doing(volume), status_text.backlog(volume, now_ns))
        text = self._with_dot(volume, "  ".join(parts))
        text.no_wrap, text.overflow = True, self._overflow
        return text

    def _with_dot(self, volume: VolumeStatus, text: str) -> Text:
        return Text.assemble((f"{self._dot} ", _STYLES.get(volume.phase, "")), text)

    def _pressure(self, volume: VolumeStatus) -> Text:
        text = Text()
        for name, share in status_text.stalls(volume):
            text.append(f"{name} ").append(self._bar(share, _BAR_CELLS), "red" if share > _BAD_STALL else "green")
            text.append(f" {share:.0%}  ")
        return text.append(" ".join(status_text.latencies(volume)[:1]) or ("" if text else "-"))

    def _free(self, volume: VolumeStatus) -> Text:
        free = status_text.share(volume.free_bytes, volume.total_bytes)
        if free is None:
            return Text("-")
        style = "red" if free < _BAD_FREE else "green"
        return Text.assemble((self._bar(free, _BAR_CELLS), style), " ", status_text.space(volume) or "")

    def _bar(self, share: float, n_cells: int) -> str:
        n_full = round(max(0.0, min(share, 1.0)) * n_cells)
        return self._full * n_full + self._empty * (n_cells - n_full)

    def _spark(self, values: Sequence[float]) -> str:
        most = max(values, default=0.0) or 1.0
        top = len(self._levels) - 1
        # Any rate above 0 is visible, however small it is compared to the peak.
        drawn = "".join(self._levels[max(round(value / most * top), int(value > 0))] for value in values)
        return drawn.rjust(_N_SAMPLES)


def _head(service: ObservedStatus, now_ns: int) -> Table:
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True)
    head.add_column(justify="right", style="dim", no_wrap=True)
    head.add_row(Text(status_text.title(service.status, now_ns), "bold"), status_text.moment(now_ns, now_ns))
    return head


def _errors(volume: VolumeStatus, now_ns: int) -> Text:
    faults = status_text.faults(volume, now_ns, most=1)
    more = f" (and {len(volume.faults) - 1} earlier)" if len(volume.faults) > 1 else ""
    return Text(faults[0] + more, "red") if faults else Text("none", "dim")
