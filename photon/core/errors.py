"""One tree of errors. Each says whose fault it is; each message says what, where and how to mend it."""


class PhotonError(Exception):
    """Root of everything Photon raises on purpose. `exit_status` is what a command ends with."""

    exit_status = 1


def told(error: BaseException) -> str:
    """An error in a line: what it says, and of one that is not raised on purpose its kind."""
    return str(error) if isinstance(error, PhotonError) else f"{type(error).__name__}: {error}".rstrip(": ")


class UsageError(PhotonError):
    """The caller's fault: a command line or a setting that can't be used. One line, exit status 2."""

    exit_status = 2


class SettingsError(UsageError):
    """A setting is unknown, of the wrong type or out of its range."""


class SettingsMismatchError(SettingsError):
    """Another process of the system works by settings that must be the same in all. No restart mends it."""


class StorageError(PhotonError):
    """The disk's fault: nothing was acknowledged that is not on it."""


class DiskFullError(StorageError):
    """No space (or no map size) left. What was acknowledged is still there; free space and go on."""


class CorruptStateError(StorageError):
    """A file of ours does not hold what was written to it. The process stops rather than forget."""


class LockedError(StorageError):
    """Another process works on the same directory."""


class UnavailableError(PhotonError):
    """A server could not answer in time. Nothing is known of the outcome: retry, with the same token."""


class OverloadedError(UnavailableError):
    """A server refused because too much is in flight. Certainly nothing was done: back off and retry."""


class NoQuorumError(UnavailableError):
    """The registry has no leader that a majority of replicas follows."""


class FencedError(PhotonError):
    """This incarnation is fenced: what it registered is recovery's. It must end; a new one may start."""


class SkewError(PhotonError):
    """The clock can't be vouched for: an id made now could lie about its time by more than the bound."""


class AddressInUseError(UsageError):
    """The port to listen on is taken."""


class AdapterError(UsageError):
    """The adapter that the settings name can't be loaded."""


def first_line(error: Exception) -> str:
    """What a library's error says, in a line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
