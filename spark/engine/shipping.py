"""Photon's own packages as one zip, for executors that have none, or another version of them."""

import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from photon.core.errors import PhotonError

PACKAGES: Final = ("photon", "idregistry", "eventstore", "dispatcher", "joiner", "spark")
ZIP_NAME: Final = "photon-packages.zip"

# The wiring of commands and servers: no task ever runs it.
_LEFT_OUT: Final = Path("photon", "app")
_LEVEL: Final = 1


class NotShippableError(PhotonError):
    """A package of Photon's has no files that could be sent to executors."""


def write_packages(directory: Path) -> Path:
    """A zip, in that directory, of the sources of the very packages that this process runs."""
    path = directory / ZIP_NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as packages:
        for name in PACKAGES:
            root = package_root(name)
            for source in sorted(root.rglob("*.py")):
                inside = Path(name, source.relative_to(root))
                if not inside.is_relative_to(_LEFT_OUT):
                    packages.write(source, inside)
    return path


def package_root(package: str) -> Path:
    """The directory that the package runs from."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise NotShippableError(f"package {package} is not installed here; install Photon anew")
    root = Path(found.submodule_search_locations[0])
    if not root.is_dir():
        raise NotShippableError(f"{root}: package {package} is no directory; install Photon unpacked")
    return root
