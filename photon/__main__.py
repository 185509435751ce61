"""The entry of the `photon` command, also as `python -m photon`: small, to be there before a Ctrl-C is."""

import sys
from typing import Final

_OPTIMIZED: Final = (
    "photon: Python runs with -O or PYTHONOPTIMIZE, so without the assertions that stop a replica whose log "
    "is not what it must be; run it without"
)

_SHORT: Final = {"--help", "--check"}
"""With these a command starts no processes."""


def main() -> None:
    """As photon.cli.main.main; 130 without a word if interrupted while that is imported."""
    if sys.flags.optimize:
        print(_OPTIMIZED, file=sys.stderr)
        sys.exit(2)
    try:
        wheel = sys.argv[1:3] == ["millwheel", "run"]
        if (wheel or sys.argv[1:2] in (["join"], ["dev"])) and not _SHORT.intersection(sys.argv):
            from photon.cluster.nursery import WHEEL, begin_ahead

            begin_ahead(WHEEL if wheel else "")
        from photon.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
