"""Computations that are ready to be put into a topology (docs/millwheel.md)."""

from millwheel.ready.pairs import Attribution, Deduplicate, Unmatched
from millwheel.ready.windows import Sessions, WindowCounts
from millwheel.ready.zeitgeist import Zeitgeist

__all__ = ["Attribution", "Deduplicate", "Sessions", "Unmatched", "WindowCounts", "Zeitgeist"]
