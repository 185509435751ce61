"""What a person sees: progress on a terminal, the summary, notices. Nothing here decides anything."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

# Rich takes long to import and is of use on a terminal only.
if TYPE_CHECKING:
    from rich.progress import Progress

_ROWS = ("foreign_events", "joined", "duplicate", "unjoinable", "filtered", "expired", "malformed", "pending")


class RunDisplay:
    """Progress of a run on stderr, only where that is a terminal; notices there in any case."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, counts: Mapping[str, Any], per_second: float) -> None:
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            self._progress = _make_progress()
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0],
            description="joining",
            completed=counts["foreign_events"] - counts["pending"],
            total=max(1, counts["foreign_events"]),
            rate=f"{per_second:,.0f}",
            pending=f"{counts['pending']:,}",
        )

    def completing(self, files: int) -> None:
        """All is joined; so many files of the joined logs have still to be completed."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=f"completing {files:,} files")

    def notice(self, text: str) -> None:
        """A line for the person, each text once."""
        if text in self._told:
            return
        self._told.add(text)
        line = f"photon: {text}"
        if self._progress is None:
            click.echo(line, err=True)
        else:  # above the bar
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _make_progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}/s  pending {task.fields[pending]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task("starting", total=None, rate="-", pending="-")
    return progress


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Something that moves and says `what`, on a terminal only; and a function to say something else."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as aligned text on stdout."""
    for name in _ROWS:
        click.echo(f"{name.replace('_', ' '):<16}{summary[name]:>14,}")
    latency = summary["latency_ms"]
    click.echo(f"{'wasted joins':<16}{summary['wasted_joins']:>14,}")
    click.echo(f"{'seconds':<16}{summary['seconds']:>14,.2f}")
    click.echo(f"{'joined/s':<16}{summary['joined_per_s']:>14,.0f}")
    if latency["p50"] is not None:
        shown = "  ".join(f"{name} {value:,.1f}" for name, value in latency.items())
        click.echo(f"{'latency ms':<16}  {shown}")
