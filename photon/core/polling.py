"""Which of the files that no kernel watch covers are looked at now: those that grew lately. Pure."""

from typing import Final

LIVELY_S: Final = 1.0  # looked at every time for so long after they grew
HOT_S: Final = 10.0
HOT_FILES: Final = 256  # so many are looked at however long they have been silent
QUIET_FILES: Final = 64  # of the silent ones, so many at a time, in turn


class Polling:
    """Numbers of files, and when they last grew."""

    def __init__(self) -> None:
        self._hot: dict[int, float] = {}  # the latest last
        self._turn = 0

    def __len__(self) -> int:
        return len(self._hot)

    def grew(self, number: int, now: float) -> None:
        self._hot.pop(number, None)
        self._hot[number] = now

    def forget(self, number: int) -> None:
        self._hot.pop(number, None)

    def turn(self, now: float) -> list[int]:
        """Those to look at now: the lively ones, and some of the others."""
        numbers = list(self._hot)
        quiet = len(numbers)
        fewest = max(0, quiet - HOT_FILES)
        while quiet > fewest and self._hot[numbers[quiet - 1]] >= now - LIVELY_S:
            quiet -= 1
        self._turn = self._turn + QUIET_FILES if self._turn + QUIET_FILES < quiet else 0
        due = numbers[quiet:]
        for number in numbers[self._turn : min(self._turn + QUIET_FILES, quiet)]:
            if self._hot[number] < now - HOT_S and len(self._hot) > HOT_FILES:
                del self._hot[number]
            else:
                due.append(number)
        return due
