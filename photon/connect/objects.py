"""Object storage as a sink (S3, Google's, Azure's, a directory): joined lines in objects that never change.

`<prefix>/<writer>/<file>-<offset>.jsonl`, or `.parquet`, holds the lines that begin there in the joined log.
It is put as a whole, and only if there is none of that name. So readers see whole objects only, of two that
write by one name one is refused, and the last object tells up to where the lines are there: by its size, or
by what its footer says.
"""

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import obstore
import pyarrow as pa
import pyarrow.parquet
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from photon.connect.ports import Guarantee
from photon.connect.uris import Uri, batching
from photon.core.errors import PhotonError, UnavailableError, UsageError, first_line
from photon.logs.parquet import convert
from photon.logs.writer import LogPosition

FORMATS: Final = ("jsonl", "parquet")
_END: Final = "photon.end"
_CLIENT: Final = ("allow_http", "timeout", "connect_timeout", "proxy_url")
_RETRIES: Final = 2
STORE_ERRORS: Final = (BaseError, FileNotFoundError)
_NEVER_WORKS: Final = (PermissionDeniedError, UnauthenticatedError)
_REFUSED: Final = re.compile(r"status code: 40[134]\b")
"""Of a listing, by what is not let in, or a bucket that is not there."""
_UNNAMED: Final = "object with invalid path"
"""In what a listing ends with at a name that obstore can't say: `a//b`."""
_VARYING: Final = re.compile(r" in [\d.]+[mnµ]?s\b|<(RequestId|HostId)>.*?</\1>|<[^>]*>", re.DOTALL)
"""What makes each answer another one; and tags."""


def store_of(uri: Uri, url: str, given: dict[str, str]) -> Any:
    """The store at this URL, with these options. UsageError."""
    options: dict[str, Any] = {}
    if uri.scheme != "file":
        options["client_options"] = {name: given.pop(name) for name in _CLIENT if name in given}
        options["retry_config"] = {"max_retries": _RETRIES}
    elif given:
        raise UsageError(f"{uri.shown}: unknown option '{next(iter(given))}'")
    try:
        make: Any = from_url
        return make(url, config=given or None, **options)
    except (BaseError, ValueError, TypeError) as error:
        raise UsageError(f"{uri.shown}: {first_line(error)}") from error


def refusal(uri: Uri, error: Exception) -> PhotonError:
    """What a store has raised, in a line; UsageError where no other try can work."""
    text = str(error).partition("\n\nDebug source")[0]
    told = f"{uri.shown}: {' '.join(_VARYING.sub(' ', text).split())}"
    if _UNNAMED in text:
        return UsageError(f"{told}; rename that object, or name a prefix that it is not under")
    if isinstance(error, _NEVER_WORKS) or _REFUSED.search(text):
        return UsageError(told)
    return UnavailableError(f"{told}; tried again")


class ObjectSink:
    """photon.connect.ports.Sink of `s3://BUCKET/PREFIX`, `gs://…`, `az://…`, `file:///DIRECTORY`.

    Options: `format`; `every_s` and `mib`, how long lines wait for others and up to how many; the store's
    settings.
    """

    guarantee = Guarantee.ATOMIC

    def __init__(self, uri: Uri, writer: str) -> None:
        given = dict(uri.options)
        self._uri, self._writer = uri, writer
        self._format = given.pop("format", FORMATS[0])
        if self._format not in FORMATS:
            raise UsageError(f"{uri.shown}: format is one of {', '.join(FORMATS)}, not '{self._format}'")
        self.batch_bytes, self.linger_s = batching(uri, given)
        if uri.scheme == "file":
            with contextlib.suppress(OSError):  # told by what follows
                Path("/", uri.path).mkdir(parents=True, exist_ok=True)
        self._store = store_of(uri, uri.text.partition("?")[0], given)

    def open(self) -> LogPosition | None:
        try:
            found = [
                one["path"]
                for part in obstore.list(self._store, self._writer, chunk_size=1000)
                for one in part
                if self._start_of(one["path"]) is not None
            ]
            return self._end_of(max(found)) if found else None
        except STORE_ERRORS as error:
            raise refusal(self._uri, error) from error

    def _end_of(self, path: str) -> LogPosition:
        start = self._start_of(path)
        assert start is not None
        if path.endswith(".jsonl"):
            return LogPosition(start.file, start.offset + obstore.head(self._store, path)["size"])
        try:
            content = pa.BufferReader(bytes(obstore.get(self._store, path).bytes()))
            notes = pyarrow.parquet.read_metadata(content).metadata or {}
            return LogPosition(start.file, int(notes[_END.encode()]))
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise UsageError(
                f"{self._uri.shown}/{path}: no object of Photon's ({first_line(error)}); use another prefix"
            ) from error

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        path = f"{self._writer}/{start.file:06d}-{start.offset:012d}.{self._format}"
        content = lines if self._format == "jsonl" else _as_parquet(lines, end)
        try:
            obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            raise UnavailableError(f"{self._uri.shown}/{path}: it is there already") from error
        except STORE_ERRORS as error:
            raise refusal(self._uri, error) from error

    def _start_of(self, path: str) -> LogPosition | None:
        """None: it is somebody else's, or of the other format, which may lack what this one has."""
        stem, _, kind = path.rpartition("/")[2].partition(".")
        file, _, offset = stem.partition("-")
        if kind != self._format or not (file.isdecimal() and offset.isdecimal()):
            return None
        return LogPosition(int(file), int(offset))

    def close(self) -> None:
        pass


def _as_parquet(lines: bytes, end: LogPosition) -> bytes:
    with tempfile.TemporaryDirectory(prefix="photon-") as directory:
        source, target = Path(directory, "lines"), Path(directory, "rows")
        source.write_bytes(lines)
        convert(source, target, notes={_END: str(end.offset)})
        return target.read_bytes()
