"""Whom a replica speaks to: its settings, corrected by what the directory says. Pure, but for the file.

The directory's table is in the log, but the log is read only with the help of the peers. So the table is also
kept in a small file beside it, which tells too how far the directory was followed. An address in the settings
goes before one in the table: a run on one machine gets new ports each time, and a machine that moved is told
so in its settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from idregistry.directory_commands import Row
from idregistry.view import View
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import CorruptStateError


@dataclass(frozen=True, slots=True)
class Table:
    """As the directory last had it. Empty before it was founded."""

    replicas: tuple[Row, ...] = ()
    removed: tuple[str, ...] = ()
    leaving: tuple[str, str] | None = None
    """(old, new)"""
    version: int = 0
    """Of the sharding configuration."""

    @property
    def age(self) -> tuple[int, int]:
        """Never less after a change, and greater after each but one: a replacement that is turned round
        changes neither who there is nor who is gone.
        """
        return self.version, 2 * len(self.removed) + (self.leaving is not None)


def table_of(view: View) -> Table:
    return Table(tuple(view.replicas.values()), view.removed, view.leaving, view.version)


def rows_now(settings: Mapping[str, Row], table: Table) -> dict[str, Row]:
    """Name -> where each replica is, this one too. Before there is a table, those of the settings."""
    if not table.replicas:
        return dict(settings)
    return {row.name: settings.get(row.name, row) for row in table.replicas}


def rows_at_start(settings: Mapping[str, Row], table: Table) -> dict[str, Row]:
    """The same before the log is read: those of both, since the table may be old; who was removed is not."""
    both = {**{row.name: row for row in table.replicas}, **settings}
    return {name: row for name, row in both.items() if name not in table.removed}


def read_table(path: Path) -> Table:
    """CorruptStateError where the file is none; an empty table where there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return Table()
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptStateError(
            f"{path}: cannot be read ({error}); remove the file if the settings name all replicas, else "
            "replace this replica"
        ) from error


def write_table(path: Path, table: Table) -> None:
    """Durably. StorageError."""
    with storage_errors(path):
        make_directory(path.parent)
        write_file(path, msgspec.json.encode(table))
