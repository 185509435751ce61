"""Patterns of log files: what they name, and in which directories that may appear."""

import contextlib
import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from photon.core.errors import UsageError

_ANY_DEPTH: Final = "**"


def check_patterns(patterns: Sequence[str]) -> None:
    """UsageError if a pattern can't ever match: its fixed leading directory is not there."""
    for pattern in patterns:
        fixed = Path(pattern) if not glob.has_magic(pattern) else Path(_fixed_part(pattern))
        if not fixed.exists():
            kind = "file or directory" if not glob.has_magic(pattern) else "directory"
            raise UsageError(f"no such {kind}: {fixed} (from '{pattern}'); check the path or create it first")


def matching_files(pattern: str, directories: set[str] | None = None) -> Iterable[str]:
    """What a glob names, or what is in a directory; not yet looked at.

    `directories` gets those in which more may appear: all that were listed, or should have been.
    """
    if os.path.isdir(pattern):
        pattern = str(Path(glob.escape(pattern)) / "*")
    parts = Path(pattern).parts
    visited = set() if directories is None else directories
    if _ANY_DEPTH not in parts:
        if directories is not None:
            directories.update(_listed(parts))
        return glob.iglob(pattern)
    # glob itself walks in circles where a link leads to a directory above it.
    depth = parts.index(_ANY_DEPTH)
    visited.update(_listed(parts[: depth + 1]))
    roots = glob.iglob(str(Path(*parts[:depth]))) if depth else (".",)
    return (n for root in roots for n in _files_below(root, (), parts[depth:], _above(root), visited))


def named_files(patterns: Sequence[str]) -> list[str]:
    """The regular files that globs and directories name now, in order, one with several names once.

    UsageError for a pattern that can't ever match.
    """
    check_patterns(patterns)
    files: dict[tuple[int, int], str] = {}
    for name in sorted({name for pattern in patterns for name in matching_files(pattern)}):
        if os.path.isfile(name):
            status = os.stat(name)
            files.setdefault((status.st_dev, status.st_ino), name)
    return list(files.values())


def may_match(patterns: Sequence[str], name: str) -> bool:
    """Whether a file of this name (its last part) can be what one of the patterns means."""
    for pattern in patterns:
        last = os.path.basename(pattern)
        if last in ("", _ANY_DEPTH) or os.path.isdir(pattern) or fnmatch.fnmatchcase(name, last):
            return True
    return False


def glob_matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether glob would find the path, part by part; `**`: any parts, but only a dot finds a dot."""
    if not pattern:
        return not path
    first, rest = pattern[0], pattern[1:]
    if first == _ANY_DEPTH:
        shown = next((n for n, part in enumerate(path) if part.startswith(".")), len(path))
        return any(glob_matches(rest, path[skipped:]) for skipped in range(shown + 1))
    if not path or (path[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatch.fnmatchcase(path[0], first) and glob_matches(rest, path[1:])


def _fixed_part(pattern: str) -> str:
    parts = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return str(Path(*parts)) if parts else "."


def _listed(parts: Sequence[str]) -> Iterator[str]:
    """The directories that are listed for a pattern without `**` but at its end."""
    wild = (n for n, part in enumerate(parts) if glob.has_magic(part))
    for depth in range(next(wild, len(parts) - 1), len(parts)):
        above = str(Path(*parts[:depth]))
        if glob.has_magic(above):
            yield from filter(os.path.isdir, glob.iglob(above))
        else:
            yield above  # though it may not be there yet


def _above(directory: str) -> frozenset[tuple[int, int]]:
    """Identities of the directories above it: a link to one of them leads out of what the pattern means."""
    identities = set()
    for parent in Path(os.path.realpath(directory)).parents:
        with contextlib.suppress(OSError):
            status = os.stat(parent)
            identities.add((status.st_dev, status.st_ino))
    return frozenset(identities)


def _files_below(
    directory: str,
    path: tuple[str, ...],
    pattern: tuple[str, ...],
    above: frozenset[tuple[int, int]],
    visited: set[str],
) -> Iterator[str]:
    """What is no directory and matches; `path`, `above`: names and identities of directories passed."""
    try:
        status = os.stat(directory)
        entries = list(os.scandir(directory))
    except OSError:
        return
    identity = status.st_dev, status.st_ino
    if identity in above:
        return
    visited.add(directory)
    hidden = any(part.startswith(".") for part in pattern)
    for entry in entries:
        inner = (*path, entry.name)
        if entry.name.startswith(".") and not hidden:
            continue
        if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path)):
            yield from _files_below(entry.path, inner, pattern, above | {identity}, visited)
        elif glob_matches(pattern, inner):
            yield entry.path
