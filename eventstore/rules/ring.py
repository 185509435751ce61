"""Which event store owns an event, or a log: consistent hashing (paper 3.4.1, its [17]). Pure.

Each member has `virtual_nodes` places on a ring of 64-bit hashes; an id belongs to the first place at or
after its own hash. So a member that comes or goes moves its own share and nothing else.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import hash_ids

_VERSION_BYTES: Final = 8


def version_of(members: Sequence[str]) -> int:
    """The same of the same members, in whatever order; never 0."""
    names = "\n".join(sorted(members)).encode()
    return int.from_bytes(hashlib.blake2b(names, digest_size=_VERSION_BYTES).digest(), "big") | 1


class Ring:
    """Immutable. Two rings of the same members and virtual nodes agree, in whatever order they are named."""

    def __init__(self, members: Sequence[str], virtual_nodes: int) -> None:
        assert members, "a ring has a member"
        self.members = tuple(sorted(set(members)))
        self.virtual_nodes = virtual_nodes
        places = np.array([_places(member, virtual_nodes) for member in self.members], np.uint64)
        owners = np.repeat(np.arange(len(self.members)), virtual_nodes)
        order = np.argsort(places.ravel(), kind="stable")
        self._places = places.ravel()[order]
        # What is beyond the last place belongs to the first.
        self._owners = np.append(owners[order], owners[order][0])

    def owners(self, ids: bytes) -> npt.NDArray[np.intp]:
        """16 x N bytes -> N indices of `members`."""
        owners: npt.NDArray[np.intp] = self._owners[np.searchsorted(self._places, hash_ids(ids))]
        return owners

    def split(self, ids: bytes) -> dict[str, npt.NDArray[np.intp]]:
        """16 x N bytes -> for each member that owns any of them the rows of those, in order."""
        owners = self.owners(ids)
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=len(self.members))
        ends = np.cumsum(counts)
        return {
            member: order[end - count : end]
            for member, count, end in zip(self.members, counts.tolist(), ends.tolist(), strict=True)
            if count
        }


def _places(member: str, virtual_nodes: int) -> list[int]:
    return [
        int.from_bytes(hashlib.blake2b(f"{member}#{number}".encode(), digest_size=8).digest(), "big")
        for number in range(virtual_nodes)
    ]
