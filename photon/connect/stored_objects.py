"""Objects of a store (S3, Google's, Azure's) as a source: JSON lines, CSV and Parquet, by their names.

An object is fetched whole before it is read, small ones some ahead, so that a store that is far away holds up
little, and a slow reader no connection. Its version is its ETag: an object never changes, but another one may
get its name.
"""

import contextlib
import glob
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Final

import obstore
from obstore.exceptions import BaseError

from photon.connect.objects import STORE_ERRORS, refusal, store_of
from photon.connect.ports import Fields
from photon.connect.tables import csv_rows, delimiter_of, json_rows, parquet_rows
from photon.connect.uris import Uri, table_of
from photon.connect.whole_files import BLOCK_BYTES, Opened, Rows, WholeFiles
from photon.core.errors import UnavailableError, UsageError
from photon.logs.files import glob_matches

_AHEAD: Final = 16
_SMALL_BYTES: Final = 1 << 20


def make_objects(uri: Uri, fields: Fields) -> WholeFiles:
    """Of `s3://BUCKET/GLOB`, `gs://…`, `az://…`; of no glob, the object and all below it. Options:
    `delimiter` of CSV; the store's."""
    given = dict(uri.options)
    kinds = {"csv": csv_rows(delimiter_of(uri, given.pop("delimiter", ","))), "parquet": parquet_rows}

    def rows_of(name: str, file: IO[bytes], fields: Fields) -> Iterator[Rows]:
        return kinds.get(table_of(name) or "", json_rows)(name, file, fields)

    return WholeFiles(uri.shown, StoredObjects(uri, given), rows_of, fields)


class StoredObjects:
    """photon.connect.whole_files.Shelf."""

    look_every_s = 10.0

    def __init__(self, uri: Uri, given: dict[str, str]) -> None:
        self._uri = uri
        self._store = store_of(uri, f"{uri.scheme}://{uri.place}", given)
        self._parts = uri.path.rstrip("/").split("/")
        fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), self._parts))
        self._magic = len(fixed) < len(self._parts)
        self._above = "/".join(fixed)
        self._answered = False
        """Once: who was let in then is asked again, whatever is said later."""
        self._sizes: dict[str, int] = {}
        self._fetching: dict[str, Future[Opened]] = {}
        self._threads = ThreadPoolExecutor(_AHEAD, "objects")

    def find(self) -> Mapping[str, str]:
        found = {}
        self._sizes.clear()
        try:
            for one in self._listed():
                if one["size"] and self._is_named(one["path"]):
                    name = f"{self._uri.scheme}://{self._uri.place}/{one['path']}"
                    found[name], self._sizes[name] = _version_of(one), one["size"]
        except STORE_ERRORS as error:
            told = refusal(self._uri, error)
            if isinstance(told, UsageError) and self._answered:
                raise UnavailableError(f"{told}; tried again") from error
            raise told from error
        self._answered = True
        return dict(sorted(found.items()))

    def _listed(self) -> Iterator[Any]:
        """Nothing beside what is named: a bucket may hold millions of others."""
        for listed in obstore.list(self._store, self._above or None, chunk_size=1000):
            yield from listed
        if self._above and not self._magic:
            with contextlib.suppress(FileNotFoundError):
                yield obstore.head(self._store, self._above)

    def _is_named(self, path: str) -> bool:
        parts = path.split("/")
        if self._magic:
            return glob_matches(self._parts, parts)
        return self._parts == [""] or parts[: len(self._parts)] == self._parts

    def told(self) -> str:
        return ""

    def open(self, name: str, following: Iterator[str]) -> Opened:
        for one in itertools.islice(following, _AHEAD):
            if one not in self._fetching and self._sizes.get(one, _SMALL_BYTES) < _SMALL_BYTES:
                self._fetching[one] = self._threads.submit(self._fetched, one)
        fetching = self._fetching.pop(name, None)
        try:
            return self._fetched(name) if fetching is None else fetching.result()
        except BaseError as error:
            raise refusal(self._uri, error) from error

    def _fetched(self, name: str) -> Opened:
        got = obstore.get(self._store, self._path(name))
        file: IO[bytes] = tempfile.SpooledTemporaryFile(_SMALL_BYTES, prefix="photon-object-")  # noqa: SIM115
        try:
            for piece in got.stream(min_chunk_size=BLOCK_BYTES):
                file.write(piece)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return Opened(_version_of(got.meta), file)

    def has(self, name: str) -> bool:
        try:
            obstore.head(self._store, self._path(name))
        except FileNotFoundError:
            return False
        except BaseError:
            pass  # it is asked again when it is read again
        return True

    def _path(self, name: str) -> str:
        return name.removeprefix(f"{self._uri.scheme}://{self._uri.place}/")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _version_of(meta: Any) -> str:
    return str(meta["e_tag"] or f"{meta['size']}-{meta['last_modified'].timestamp()}")
