"""Event stores over logs of blocks (docs/formats.md): the map points at lines inside them."""

import pytest

from eventstore.client import EventStoreClient
from photon.core.blocks import encode_primary
from photon.core.columns import join_lines
from photon.core.fates import Found
from photon.core.formats import Formats
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary
from tests.eventstore.kit import PACKER, append, line, pack, wait_until
from tests.eventstore.test_sharing import serve


@pytest.fixture
def root(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def encoded(lines, events_max=50):
    formats = Formats(Primary(), Foreign(), IdPacker())
    batch = formats.lines.parse_primary(join_lines(lines))
    return encode_primary(batch, formats.labels, events_max)


def test_events_in_blocks_are_found_in_the_cache_and_by_the_map(root):
    """Photon ids over the ends of blocks, opaque ones, and a log of lines beside."""
    idents = [f"10.0.0.{n % 3}:1:{n * 1000}" if n % 2 else f"opaque-{n}" for n in range(2000)]
    lines = [line(ident, f"{n}{'x' * (n % 90)}") for n, ident in enumerate(idents)]
    (root / "logs" / "a.pblk").write_bytes(encoded(lines[:1500]))
    append(root / "logs" / "b.jsonl", *lines[1500:])
    document = {"logs": {"scan_interval_s": 0.05}, "eventstore": {"map_interval_bytes": 1024}}
    for hits in ("cache", "logs"):
        server = serve(root, document=document)
        client = EventStoreClient(server.listen, 10.0)
        wait_until(lambda: client.status()["caught_up"] and client.status()["primary_events"] == 2000)
        for start in range(0, 2000, 500):
            part = slice(start, start + 500)
            assert client.lookup(PACKER.pack(idents[part])) == (bytes(500), lines[part])
        for n in range(1, 2000, 97):
            assert client.lookup(pack(idents[n])) == (bytes(1), [lines[n]])
        assert client.lookup(pack("10.0.0.1:1:7"))[0] == bytes([Found.ABSENT])
        assert client.status()[hits]["hits"] >= 2000
        assert client.status()["malformed"] == 0
        client.close()
        server.stop()


def test_a_block_that_grows_is_found_when_it_is_whole(root):
    data = encoded([line("10.0.0.1:1:5"), line("opaque")])
    path = root / "logs" / "a.pblk"
    server = serve(root)
    client = EventStoreClient(server.listen, 10.0)
    try:
        path.write_bytes(data[:-10])
        wait_until(lambda: client.status()["unended"])
        assert client.lookup(pack("opaque"))[0] == bytes([Found.ABSENT])
        with open(path, "ab") as file:
            file.write(data[-10:])
        wait_until(lambda: client.lookup(pack("opaque"))[0] == bytes(1))
        assert client.lookup(pack("10.0.0.1:1:5"))[1] == [line("10.0.0.1:1:5")]
    finally:
        client.close()
        server.stop()
