"""Ids in 16 bytes: round trips, kinds and canonical forms (paper 3.1)."""

import ipaddress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core import ids as ids_module
from photon.core.ids import ID_BYTES, IdPacker, opaque_mask, server_keys, timestamps_us

process_ids = st.integers(0, 2**32 - 1)
times_us = st.integers(0, 10**18 - 1)
ipv4 = st.ip_addresses(v=4).filter(lambda a: a.packed[0] < 224)
ipv6 = st.ip_addresses(v=6).filter(lambda a: a.ipv4_mapped is None)
ipv4_ids = st.builds(lambda a, p, t: f"{a}:{p}:{t}", ipv4, process_ids, times_us)
ipv6_ids = st.builds(lambda a, p, t: f"[{a}]:{p}:{t}", ipv6, process_ids, times_us)
opaque_texts = st.one_of(
    st.uuids().map(lambda u: u.hex), st.text(max_size=40), st.text("0123456789abcdef.:[]", max_size=40)
)
any_texts = st.one_of(ipv4_ids, ipv6_ids, opaque_texts)


def format_photon_id(packed: bytes) -> str | None:
    """The text of an IPv4 photon id; None for other kinds, which can't be turned back."""
    if packed[0] >= 0xE0:
        return None
    address = ipaddress.IPv4Address(packed[:4])
    return f"{address}:{int.from_bytes(packed[4:8], 'big')}:{int.from_bytes(packed[8:], 'big')}"


def rows(column: bytes) -> list[bytes]:
    return [column[at : at + ID_BYTES] for at in range(0, len(column), ID_BYTES)]


@given(ipv4_ids)
def test_an_ipv4_id_comes_back_as_the_text_it_was(text: str) -> None:
    assert format_photon_id(IdPacker().pack([text])) == text


@given(st.lists(st.one_of(ipv4_ids, ipv6_ids), min_size=1, max_size=20))
def test_the_time_of_a_photon_id_can_be_read_from_its_bytes(texts: list[str]) -> None:
    column = IdPacker().pack(texts)
    assert timestamps_us(column).tolist() == [int(t.rpartition(":")[2]) for t in texts]
    assert not opaque_mask(column).any()


@given(ipv6, process_ids, st.lists(times_us, min_size=2, max_size=10))
def test_ids_of_one_server_and_process_share_a_key_and_sort_by_time(
    address: ipaddress.IPv6Address, process: int, times: list[int]
) -> None:
    for server in (f"[{address}]:{process}", f"10.0.0.1:{process}"):
        column = IdPacker().pack([f"{server}:{t}" for t in times])
        assert len(set(server_keys(column).tolist())) == 1
        assert [int.from_bytes(key[8:], "big") for key in sorted(rows(column))] == sorted(times)


@given(st.lists(st.tuples(ipv6, process_ids), min_size=2, max_size=50, unique=True))
def test_other_ipv6_servers_and_processes_get_other_keys(
    servers: list[tuple[ipaddress.IPv6Address, int]],
) -> None:
    column = IdPacker().pack([f"[{a}]:{p}:0" for a, p in servers])
    assert len(set(server_keys(column).tolist())) == len(servers)


@given(st.lists(any_texts, max_size=30, unique=True))
def test_different_texts_have_different_keys(texts: list[str]) -> None:
    assert len(set(rows(IdPacker().pack(texts)))) == len(texts)


@given(st.lists(any_texts, max_size=30))
def test_the_key_of_a_text_does_not_depend_on_its_batch_or_on_what_was_packed_before(
    texts: list[str],
) -> None:
    packer = IdPacker()
    assert packer.pack(texts) == b"".join(IdPacker().pack([t]) for t in texts)
    assert packer.pack(texts) == packer.pack(texts)


@given(st.lists(any_texts, min_size=1, max_size=20))
def test_the_first_nibble_says_the_kind(texts: list[str]) -> None:
    for text, key in zip(texts, rows(IdPacker().pack(texts)), strict=True):
        kind = key[0] >> 4
        assert opaque_mask(key)[0] == (kind == 0xE)
        if kind < 0xE:
            assert format_photon_id(key) == text
        elif kind == 0xF:
            assert text.startswith("[")
        assert (format_photon_id(key) is None) == (kind >= 0xE)


@pytest.mark.parametrize(
    "text",
    [
        "010.0.0.1:1:5",  # leading zeros: two texts for one id
        "10.0.0.1:01:5",
        "10.0.0.1:1:05",
        "10.0.0.1:1:+5",
        "10.0.0.1:1:-5",
        "10.0.0.1:1: 5",
        "10.0.0.1:1:",
        "10.0.0.1::5",
        "10.0.0:1:5",
        "256.0.0.1:1:5",
        "224.0.0.1:1:5",  # multicast and reserved: no server
        "255.255.255.255:1:5",
        "10.0.0.1:4294967296:5",
        "10.0.0.1:1:1000000000000000000",
        "10.0.0.1:1:٥",  # digits that are not ASCII
        "١٠.0.0.1:1:5",
        "10.0.0.1:1:5:6",
        "2001:db8::1:1:5",  # IPv6 without brackets
        "[2001:DB8::1]:1:5",
        "[2001:db8:0::1]:1:5",
        "[::ffff:10.0.0.1]:1:5",  # mapped IPv4: its text depends on the Python version
        "[::ffff:a00:1]:1:5",
        "[fe80::1%eth0]:1:5",
        "[10.0.0.1]:1:5",
        "10.0.0.1:1:5\n",
        "",
        ":",
        "::",
    ],
)
def test_a_text_in_no_canonical_form_is_opaque(text: str) -> None:
    packed = IdPacker().pack([text])
    assert opaque_mask(packed).all()
    assert packed != IdPacker().pack(["10.0.0.1:1:5"])
    assert IdPacker().pack([text]) != IdPacker(b"another").pack([text]), "no digest"


def test_one_odd_text_does_not_change_the_others_of_its_batch() -> None:
    good = [f"10.0.0.1:7:{t}" for t in range(100)]
    mixed = [*good[:50], "0af7651916cd43dd8448eb211c80319c", *good[50:], "a:b"]
    column = rows(IdPacker().pack(mixed))
    assert b"".join(column[:50] + column[51:101]) == IdPacker().pack(good)
    assert opaque_mask(b"".join(column)).nonzero()[0].tolist() == [50, 101]


def test_another_key_gives_other_digests_and_the_same_ipv4_ids() -> None:
    texts = ["abc", "[2001:db8::1]:1:5", "10.0.0.1:1:5"]
    one, other = rows(IdPacker(b"one").pack(texts)), rows(IdPacker(b"other").pack(texts))
    assert one[0] != other[0] and one[1][:8] != other[1][:8] and one[2] == other[2]


def test_a_lone_surrogate_is_an_id_like_any_other() -> None:
    assert len(set(rows(IdPacker().pack(["\ud800", "\ud801", "?"])))) == 3


def test_servers_are_remembered_within_a_bound_and_look_alikes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ids_module, "_SERVER_CACHE_MAX", 10)
    packer = IdPacker()
    texts = [f"10.0.0.{n}:1:5" for n in range(9)]
    packer.pack(texts)
    packer.pack(["urn:uuid:1"])
    assert len(packer._servers) == 9
    assert packer.pack([f"10.0.1.{n}:1:5" for n in range(9)] + texts[:1]) == IdPacker().pack(
        [f"10.0.1.{n}:1:5" for n in range(9)] + texts[:1]
    )
    assert len(packer._servers) <= 10


def test_packed_ids_never_change_from_one_release_to_the_next() -> None:
    """The format is for ever: registries and maps on disk hold these bytes."""
    texts = ["10.1.2.3:4242:1700000000000000", "[2001:db8::1]:7:1700000000000000", "0af7651916cd43dd"]
    assert [key.hex() for key in rows(IdPacker().pack(texts))] == [
        "0a0102030000109200060a24181e4000",
        "f74937c5a808078a00060a24181e4000",
        "e2fca63b7059a1143a24ecd6e0d0b4f2",
    ]


def test_no_texts_make_an_empty_column() -> None:
    assert IdPacker().pack([]) == b""
    assert opaque_mask(b"").size == timestamps_us(b"").size == server_keys(b"").size == 0
    assert np.asarray(timestamps_us(b"")).dtype == np.int64


def test_a_batch_is_packed_as_its_ids_one_by_one():
    """Batches of ids that are alike take a shorter way; those that nearly are must not."""
    alike = [f"10.0.0.{n}:{n}:{1_700_000_000_000_000 + n}" for n in range(5)]
    nearly = [
        "10.0.0.1:7:0700000000000000",
        "10.0.0.1:7:17000000000000:0",
        "10.0.0.1:7:170000000000000/",
        "10.0.0.1:7:170000000000000\u0663",
        "10.0.0.1:07:1700000000000000",
        "10.0.0.1:7:17000000000000000",
        ":1700000000000000",
        "1700000000000000",
        "[2001:db8::1]:7:1700000000000000",
        "[2001:db8:1111:2222:3333:4444:5555:6666]:4294967295:1700000000000000",
        " 10.0.0.1:7:1700000000000000",
        "10.0.0.1:7: 1700000000000000",
        "10.0.0.1:7:170000000000000 ",
        "10.0.0.1 :7:1700000000000000",
        "\x0010.0.0.1:7:1700000000000000",
        "256.0.0.1:7:1700000000000000",
        "10.0.0.1:7x1700000000000000",
        "x" * 100 + ":7:1700000000000000",
        "x" * 60,
        "",
    ]
    for batch in (alike, *[[*alike, text] for text in nearly], nearly):
        assert IdPacker().pack(batch) == b"".join(IdPacker().pack([text]) for text in batch)


def test_numbers_among_photon_ids_stand_for_their_text():
    photon = "10.0.0.1:7:1700000000000000"
    assert IdPacker().pack([photon, 17, 10**30]) == IdPacker().pack([photon, "17", str(10**30)])


def test_padded_servers_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr(ids_module, "_SERVER_CACHE_MAX", 10)
    packer = IdPacker()
    for first in range(0, 60, 6):
        texts = [f"10.0.0.{n}:1:{1_700_000_000_000_000 + n}" for n in range(first, first + 9)]
        assert packer.pack(texts) == b"".join(IdPacker().pack([text]) for text in texts)
        assert len(packer._padded) <= 10


@given(
    st.lists(st.builds(lambda a, p, t: f"{a}:{p}:{t}", ipv4, process_ids, st.integers(10**15, 10**16 - 1)))
)
def test_ids_of_our_days_are_packed_as_the_plain_definition_says(texts):
    expected = b""
    for text in texts:
        address, process, time = text.split(":")
        expected += ipaddress.IPv4Address(address).packed
        expected += int(process).to_bytes(4, "big") + int(time).to_bytes(8, "big")
    assert IdPacker().pack(texts) == expected
