"""What can be wrong with a topology, or with what a worker may still write."""

from photon.core.errors import PhotonError, UsageError


class TopologyError(UsageError):
    """A topology that can't be: the message names the part and the mend."""


class ZombieError(PhotonError):
    """Another worker has the key intervals of this one by now (paper 6.2): what it did since is void."""
