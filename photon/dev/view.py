"""What a person or a script sees of `photon dev` while it runs. Nothing here decides anything."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from photon.dev.figures import Figures, PipelineFigures, ShardFigures

# Rich takes long to import and is of use on a terminal only.
if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

LINE_EVERY_S: Final = 5.0
JSON_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the run, `seconds` after all was up. `killed`: datacenters that are kept down."""

    seconds: float
    phase: str
    figures: Figures
    killed: Sequence[str]
    restarts: int

    def state_of(self, row: PipelineFigures) -> str:
        if row.datacenter in self.killed:
            return "killed"
        return "starting" if row.silent else "up"


class View(Protocol):
    """Where looks and notices go."""

    def show(self, look: Look) -> None: ...

    def notice(self, text: str) -> None:
        """A line for the person; each text once."""

    def close(self) -> None: ...


def make_view(as_json: bool) -> View:
    """Of JSON lines where asked for; tables on a terminal; else plain lines."""
    if as_json:
        return JsonLines()
    return LiveTables() if sys.stdout.isatty() else PlainLines()


class _Notices:
    def __init__(self) -> None:
        self._told: set[str] = set()

    def notice(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _tell(self, text: str) -> None:
        click.echo(f"photon: {text}", err=True)


class _Every:
    """Of many looks one each so many seconds, and the first of each phase."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_s, self._phase = 0.0, ""

    def takes(self, look: Look) -> bool:
        if look.phase == self._phase and look.seconds < self._due_s:
            return False
        self._due_s, self._phase = look.seconds + self._every_s, look.phase
        return True


class JsonLines(_Notices):
    """An object a second on stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._every = _Every(JSON_EVERY_S)

    def show(self, look: Look) -> None:
        if self._every.takes(look):
            click.echo(json.dumps(document_of(look)))

    def close(self) -> None:
        pass


class PlainLines(_Notices):
    """A line for each datacenter and one for the registry, every few seconds, on stdout."""

    def __init__(self) -> None:
        super().__init__()
        self._every = _Every(LINE_EVERY_S)

    def show(self, look: Look) -> None:
        if self._every.takes(look):
            for line in lines_of(look):
                click.echo(line)

    def close(self) -> None:
        pass


class LiveTables(_Notices):
    """Tables that stay in their place on the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None

    def show(self, look: Look) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(tables_of(look), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _tell(self, text: str) -> None:
        if self._live is None:
            super()._tell(text)
        else:  # above the tables
            self._live.console.print(f"photon: {text}", markup=False, highlight=False, soft_wrap=True)


def document_of(look: Look) -> dict[str, Any]:
    """The look as plain values, for `--json`."""
    figures = look.figures
    return {
        "seconds": round(look.seconds, 1),
        "phase": look.phase,
        "datacenters": {
            row.datacenter: {**_without(asdict(row), "datacenter"), "state": look.state_of(row)}
            for row in figures.pipelines
        },
        "shards": [asdict(row) for row in figures.shards],
        "replicas": figures.replicas,
        "replicas_up": figures.replicas_up,
        "killed": list(look.killed),
        "silent": list(figures.silent),
        "restarts": look.restarts,
    }


def lines_of(look: Look) -> list[str]:
    at = f"{look.seconds:6.1f} s"
    lines = []
    for row in look.figures.pipelines:
        cells = _cells(row)
        shown = f"{at}  {row.datacenter:<8} {look.state_of(row):<8}"
        shown += "".join(f"  {name} {cells[name]}" for name in ("joined", "joined/s"))
        shown += f"  p50/p90/p99 ms {cells['p50']}/{cells['p90']}/{cells['p99']}"
        shown += "".join(f"  {name} {cells[name]}" for name in ("cache", "wasted", "waiting"))
        lines.append(shown + ("" if row.adds_up else "  FATES DO NOT ADD UP"))
    for shard in look.figures.shards:
        cells = _shard_cells(shard)
        lines.append(
            f"{at}  shard {shard.shard}  leader {cells['leader']}  ids {cells['ids']}  "
            f"batches/s {cells['batches/s']}  events/batch {cells['events/batch']}"
        )
    return [*lines, f"{at}  {_state(look)}"]


def tables_of(look: Look) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    pipelines = Table("datacenter", "region", "state", box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        pipelines.add_column(name, justify="right")
    for row in look.figures.pipelines:
        state = look.state_of(row)
        colour = {"up": "green", "killed": "red"}.get(state, "yellow")
        cells = _cells(row)
        pipelines.add_row(
            row.datacenter, row.region, Text(state, style=colour), *(cells[name] for name in _COLUMNS)
        )
    shards = Table("shard", "leader", box=None, header_style="bold", pad_edge=False)
    for name in _SHARD_COLUMNS:
        shards.add_column(name, justify="right")
    for shard in look.figures.shards:
        cells = _shard_cells(shard)
        shards.add_row(str(shard.shard), cells["leader"], *(cells[name] for name in _SHARD_COLUMNS))
    head = Text(f"photon dev  {look.seconds:,.0f} s  {look.phase}", style="bold")
    return Group("", head, "", pipelines, "", shards, "", Text(_state(look)))


_COLUMNS: Final = ("joined", "joined/s", "p50", "p90", "p99", "cache", "wasted", "waiting")
_SHARD_COLUMNS: Final = ("ids", "batches/s", "events/batch")


def _cells(row: PipelineFigures) -> dict[str, str]:
    latency = {name: row.latency_ms.get(name) for name in ("p50", "p90", "p99")}
    wasted = _number(row.wasted_joins)
    return {
        "joined": _number(row.joined),
        "joined/s": f"{row.joined_per_s:,.0f}" if row.joined is not None else "-",
        **{name: "-" if value is None else f"{value:,.0f}" for name, value in latency.items()},
        "cache": _percent(row.cache_hit_ratio),
        "wasted": f"{wasted} ({_percent(row.wasted_ratio)})" if row.wasted_ratio is not None else wasted,
        "waiting": _number(row.pending),
    }


def _shard_cells(row: ShardFigures) -> dict[str, str]:
    where = f" ({row.datacenter})" if row.datacenter else ""
    return {
        "leader": f"{row.leader}{where}" if row.leader is not None else "NONE",
        "ids": f"{row.ids:,}",
        "batches/s": f"{row.batches_per_s:,.0f}",
        "events/batch": "-" if row.events_per_batch is None else f"{row.events_per_batch:,.1f}",
    }


def _state(look: Look) -> str:
    figures = look.figures
    parts = [f"replicas {figures.replicas_up}/{figures.replicas}", f"restarts {look.restarts}"]
    if look.killed:
        parts.append(f"killed: {', '.join(look.killed)}")
    if figures.silent:
        parts.append(f"down: {', '.join(figures.silent)}")
    return "  ".join(parts)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _without(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}
