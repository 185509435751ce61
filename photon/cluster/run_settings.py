"""The settings of a command that reads the logs of a run beside it: events are read as the run reads them."""

from pathlib import Path

from photon.core.errors import SettingsError
from photon.core.settings import Settings, reading_fingerprint


def check_reads_alike(settings: Settings, config: Path, runs: Settings, work: Path) -> None:
    """SettingsError where `settings`, of the file `config`, read events otherwise than those of the run in
    `work`: they would be taken for other ones, and joined twice."""
    if reading_fingerprint(settings) != reading_fingerprint(runs):
        raise SettingsError(
            f"{config}: [foreign], [primary], ids.key and logs.line_bytes_max must be those of the run in "
            f"{work}, or events would be joined twice; leave --config out to use them"
        )
