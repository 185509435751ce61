"""The entry of the `photon` command, also as `python -m photon`: small, to be there before a Ctrl-C is."""

import sys


def main() -> None:
    """As photon.cli.main.main; 130 without a word if interrupted while that is imported."""
    try:
        from photon.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
