"""An id's form in memory: nothing of it is lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules.packing import FEW, Encoded, split_keys, unhash_ids
from photon.core.columns import hash_ids

IDS = st.lists(st.binary(min_size=16, max_size=16), max_size=3 * FEW).map(b"".join)


@settings(deadline=None)
@given(IDS)
def test_the_hash_of_an_id_is_turned_back(ids: bytes) -> None:
    batch = Encoded(ids)
    assert (batch.hashes == hash_ids(ids)).all()
    assert unhash_ids(batch.hashes, batch.tails) == ids


@settings(deadline=None)
@given(IDS)
def test_few_ids_and_many_are_encoded_alike(ids: bytes) -> None:
    whole = Encoded(ids)
    each = [Encoded(ids[at : at + 16]) for at in range(0, len(ids), 16)]
    many = Encoded(ids * (FEW + 1))
    assert whole.keys == tuple(one.keys[0] for one in each) == many.keys[: whole.count]
    assert whole.subs == b"".join(one.subs for one in each) == many.subs[: whole.count]


@settings(deadline=None)
@given(IDS)
def test_sub_dict_and_key_together_are_the_id(ids: bytes) -> None:
    batch = Encoded(ids)
    for row, (sub, key) in enumerate(zip(batch.subs, batch.keys, strict=True)):
        hashes, tails = split_keys(sub, [key])
        assert unhash_ids(hashes, tails) == ids[16 * row : 16 * row + 16]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_every_hash_and_half_is_some_ids(hashed: int, half: int) -> None:
    ids = unhash_ids(np.array([hashed], np.uint64), np.array([half], np.uint64))
    assert int(hash_ids(ids)[0]) == hashed
    assert ids[8:] == half.to_bytes(8, "little")
