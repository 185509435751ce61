"""The code of a topology as it was read at the start of a run or at its last deploy: workers run that,
whatever stands in its files by then.

Kept are the sources of the topology's own module, of its package and of the current directory, as far as they
were imported, and what stands beside these, which a call may import later. Paths stay what they were.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

import msgspec

from millwheel.topology import Topology, load_topology
from photon.core.disk import storage_errors
from photon.core.errors import PhotonError

FILE: Final = "code"
"""In the work directory."""
_OURS: Final = frozenset(loaded.partition(".")[0] for loaded in sys.modules)
"""What is loaded before any topology is: never loaded again."""
_HOME: Final = Path(__file__).parents[1]
"""A current directory that has us, too, has more that is ours."""


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A module's file and what it held, empty of a package without; where the modules of a package are."""

    path: str
    source: bytes
    within: list[str] | None


class _Loader(SourceFileLoader):
    """Never by what was compiled before, which may be of another source."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.path)


class _Finder:
    """On sys.meta_path, before files are. `module`: whose topology is loaded: then it keeps what it finds."""

    def __init__(self, kept: dict[str, _Kept], module: str | None = None) -> None:
        self.kept, self._module = kept, module
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.kept and self._module is not None:
            found = PathFinder.find_spec(name, path)
            if found is None or not _is_users(name, self._module, found):
                return None
            within = found.submodule_search_locations
            if isinstance(found.loader, SourceFileLoader):
                at = found.loader.path
                self.kept[name] = _Kept(at, Path(at).read_bytes(), None if within is None else list(within))
            elif found.loader is None and within is not None:  # a package without a file
                self.kept[name] = _Kept("", b"", list(within))
        kept = self.kept.get(name)
        if kept is None:
            return None
        if not kept.path:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = kept.within
            return spec
        loader = _Loader(name, kept.path, kept.source)
        return spec_from_file_location(name, kept.path, loader=loader, submodule_search_locations=kept.within)

    def keep_beside(self) -> None:
        """The modules beside those that were found."""
        beside = [(f"{name}.", place) for name, kept in self.kept.items() for place in kept.within or ()]
        beside += [("", str(Path.cwd()))] if self.kept and Path.cwd() != _HOME else []
        for package, place in beside:
            for path in Path(place).glob("*.py"):
                name = package + path.stem
                if path.stem.isidentifier() and path.stem != "__init__" and name not in {*self.kept, *_OURS}:
                    with contextlib.suppress(OSError):
                        self.kept[name] = _Kept(str(path), path.read_bytes(), None)


def load(name: str, check: Callable[[Topology], None] = lambda _: None) -> tuple[Topology, bytes]:
    """The topology as its modules are now, and these, for `load_kept`. Where that, or the check, fails with a
    PhotonError, what was loaded before stays loaded."""
    module = name.partition(":")[0]
    former = _forget(module)
    importlib.invalidate_caches()
    finder = _Finder({}, module)
    try:
        topology = load_topology(name)
        check(topology)
        finder.keep_beside()
    except PhotonError:
        _forget(module)
        sys.modules.update(former)
        raise
    finally:
        sys.meta_path.remove(finder)
    return topology, msgspec.msgpack.encode(finder.kept)


def load_kept(name: str, work: Path) -> Topology:
    """The topology by the code in this work directory, for good. StorageError, TopologyError."""
    path = work / FILE
    with storage_errors(path):
        _Finder(msgspec.msgpack.decode(path.read_bytes(), type=dict[str, _Kept]))
    return load_topology(name)


def _forget(module: str) -> dict[str, ModuleType]:
    """What is loaded of the user."""
    users = [loaded for loaded in sys.modules if _is_users(loaded, module, None)]
    return {loaded: sys.modules.pop(loaded) for loaded in users}


def _is_users(name: str, module: str, found: ModuleSpec | None) -> bool:
    """`module`: of the topology. `found`: the spec, of one that is not loaded yet."""
    top = name.partition(".")[0]
    if top in _OURS:
        return False
    spec = found if found is not None and top == name else getattr(sys.modules.get(top), "__spec__", None)
    here = Path.cwd()
    return top == module.partition(".")[0] or (here != _HOME and _found_in(spec) == here)


def _found_in(spec: ModuleSpec | None) -> Path | None:
    """The directory in which a module, or a package, was found."""
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec is not None and spec.origin and spec.has_location else None
