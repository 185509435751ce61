"""The handshake: who knows the secret comes in, and nobody who heard, changes or repeats what was said."""

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.protocol import NEWEST
from photon.raft.handshake import Handshake, HandshakeError, RefusedError
from photon.raft.store import LIFE_BYTES
from tests.raft.link_kit import life_of

Admit = Callable[[str, bytes, bytes], str | None]


def anybody(peer: str, life: bytes, last_life: bytes) -> str | None:
    return None


def remembered(peer: str) -> bytes:
    return f"once {peer}".encode().ljust(LIFE_BYTES, b".")


def dialing(node: str = "a", target: str = "b", secret: bytes = b"s", admit: Admit = anybody) -> Handshake:
    return Handshake(node, life_of(node), secret, os.urandom, target, remembered, admit)


def accepting(node: str = "b", secret: bytes = b"s", admit: Admit = anybody) -> Handshake:
    return Handshake(node, life_of(node), secret, os.urandom, None, remembered, admit)


def shake(dialer: Handshake, acceptor: Handshake, bindings: tuple[bytes, bytes] = (b"", b"")) -> list[bytes]:
    """All that was said, in turn."""
    said = [dialer.begin(bindings[0])]
    acceptor.begin(bindings[1])
    sides = [acceptor, dialer]
    while said[-1]:
        said.append(sides[(len(said) - 1) % 2].feed(said[-1]))
    return said[:-1]


def test_both_sides_prove_that_they_know_the_secret() -> None:
    dialer, acceptor = dialing(), accepting()
    shake(dialer, acceptor)
    assert (dialer.peer, acceptor.peer) == ("b", "a")


def test_both_sides_have_the_same_keys_one_for_each_direction_and_session() -> None:
    keys = set()
    for _ in range(2):
        dialer, acceptor = dialing(), accepting()
        shake(dialer, acceptor)
        assert dialer.keys == acceptor.keys[::-1]
        keys |= {*dialer.keys}
    assert len(keys) == 4 and {len(key) for key in keys} == {32}


def test_each_side_is_told_the_others_life_and_what_it_remembers_once_it_is_proved() -> None:
    seen: list[tuple[str, bytes, bytes]] = []

    def admit(peer: str, life: bytes, last_life: bytes) -> str | None:
        seen.append((peer, life, last_life))
        return None

    shake(dialing(admit=admit), accepting(admit=admit))
    assert seen == [("b", life_of("b"), remembered("a")), ("a", life_of("a"), remembered("b"))]


def test_nobody_who_lacks_the_secret_has_its_life_seen() -> None:
    def admit(peer: str, life: bytes, last_life: bytes) -> str | None:
        raise AssertionError("asked about one that has proved nothing")

    with pytest.raises(HandshakeError, match="does not know the cluster's secret"):
        shake(dialing(admit=admit), accepting(secret=b"other", admit=admit))
    acceptor = accepting(admit=admit)
    acceptor.feed(dialing(secret=b"other").begin())
    with pytest.raises(HandshakeError, match="one that says it is a does not know"):
        acceptor.feed(b"\x20\x00" + bytes(32))


@pytest.mark.parametrize("refuser", ["a", "b"])
def test_a_refused_side_is_told_why_by_one_that_knows_the_secret(refuser: str) -> None:
    def refuse(peer: str, life: bytes, last_life: bytes) -> str | None:
        return "its disk is another one: replace it"

    dialer = dialing(admit=refuse if refuser == "a" else anybody)
    acceptor = accepting(admit=refuse if refuser == "b" else anybody)
    refused = "b" if refuser == "a" else "a"
    with pytest.raises(RefusedError, match=f"{refuser} refuses this node: its disk is another one") as caught:
        shake(dialer, acceptor)
    assert caught.value.peer == refuser
    refusing = dialer if refuser == "a" else acceptor
    assert refusing.refusal is not None and refusing.refusal.peer == refused
    assert dialer.peer is None and acceptor.peer is None


@pytest.mark.parametrize("refuser", ["a", "b"])
def test_a_refusal_cannot_be_taken_for_a_welcome_nor_changed(refuser: str) -> None:
    def refuse(peer: str, life: bytes, last_life: bytes) -> str | None:
        return "no"

    dialer = dialing(admit=refuse if refuser == "a" else anybody)
    acceptor = accepting(admit=refuse if refuser == "b" else anybody)
    said = dialer.feed(acceptor.feed(dialer.begin()))
    refused, told = (acceptor, said) if refuser == "a" else (dialer, acceptor.feed(said))
    proof = told[-32:]
    for forged in (b"", b"on"):
        message = len(forged + proof).to_bytes(2, "little") + forged + proof
        with pytest.raises(HandshakeError):
            refused.feed(message)
    with pytest.raises(RefusedError):
        refused.feed(told)
    assert refused.peer is None


@pytest.mark.parametrize("length", [653, 0x7FFF, 0xFFFF])
def test_a_giant_length_is_refused_before_anything_is_kept(length: int) -> None:
    for side in (dialing(), accepting()):
        with pytest.raises(HandshakeError, match=f"a handshake message of {length} bytes"):
            side.feed(length.to_bytes(2, "little"))


def test_another_secret_is_refused_by_whom_it_is_shown_to_first() -> None:
    dialer, acceptor = dialing(secret=b"other"), accepting()
    with pytest.raises(HandshakeError, match="does not know the cluster's secret"):
        shake(dialer, acceptor)
    assert acceptor.peer is None


def test_any_flipped_bit_of_any_message_ends_the_handshake() -> None:
    for number in range(4):
        size = len(shake(dialing(), accepting())[number])
        for bit in range(size * 8):
            dialer, acceptor = dialing(), accepting()
            sides = [acceptor, dialer]
            message = dialer.begin()
            with suppress(HandshakeError):
                for turn in range(4):
                    if turn == number:
                        message = bytes(
                            byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(message)
                        )
                    message = sides[turn % 2].feed(message)
            # The acceptor is through before its last message, which is not its to verify.
            assert dialer.peer is None
            assert acceptor.peer is None or number == 3


def test_a_recorded_handshake_cannot_be_played_again() -> None:
    said = shake(dialing(), accepting())
    again = accepting()
    again.feed(said[0])
    with pytest.raises(HandshakeError):
        again.feed(said[2])
    again = dialing()
    again.begin()
    with pytest.raises(HandshakeError):
        again.feed(said[1])


def test_an_acceptors_own_proof_cannot_be_reflected_to_it() -> None:
    dialer, acceptor = dialing(), accepting()
    challenge = acceptor.feed(dialer.begin())
    with pytest.raises(HandshakeError):
        acceptor.feed(b"\x20\x00" + challenge[-32:])
    acceptor = accepting()
    acceptor.feed(dialing().begin())
    with pytest.raises(HandshakeError):
        acceptor.feed(challenge)


def test_a_proof_is_good_for_one_tls_session_only() -> None:
    """One with a certificate of the CA, between two nodes, holds two sessions and cannot make them one."""
    dialer, acceptor = dialing(), accepting()
    shake(dialer, acceptor, (b"session", b"session"))
    assert dialer.peer == "b"
    with pytest.raises(HandshakeError, match="does not know the cluster's secret"):
        shake(dialing(), accepting(), (b"session with the one between", b"another"))


def test_the_wrong_node_is_told_what_is_wrong() -> None:
    with pytest.raises(HandshakeError, match="a looks for c but has reached b"):
        shake(dialing(target="c"), accepting())
    dialer = dialing()
    with pytest.raises(HandshakeError, match="dialed b but reached c"):
        dialer.feed(accepting("c").feed(dialing(target="c").begin()))


def test_another_version_is_named() -> None:
    hello = bytearray(dialing().begin())
    hello[10:14] = bytes((NEWEST + 2, 0, NEWEST + 1, 0))
    with pytest.raises(
        HandshakeError, match="versions 2 to 3 of the protocol, this node 1 to 1: upgrade thr"
    ):
        accepting().feed(bytes(hello))


def test_builds_whose_versions_overlap_speak_and_know_the_newest_of_each_other() -> None:
    hello = bytearray(dialing().begin())
    hello[10:14] = bytes((NEWEST + 1, 0, NEWEST, 0))
    newer = accepting()
    newer.feed(bytes(hello))
    assert newer.newest == NEWEST + 1


@pytest.mark.parametrize("name", ["a\nforged line", "a\x1b[2J", "\u2028"])
def test_an_unproved_id_cannot_write_lines_into_the_log(name: str) -> None:
    with pytest.raises(HandshakeError, match="a node id that is not text"):
        accepting().feed(dialing(node=name).begin())


def test_a_reason_cannot_write_lines_into_the_log() -> None:
    def refuse(peer: str, life: bytes, last_life: bytes) -> str | None:
        return "\nforged line" * 100

    with pytest.raises(RefusedError) as caught:
        shake(dialing(), accepting(admit=refuse))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@given(st.integers(0, 3), st.binary(max_size=150), st.integers(0, 200))
def test_garbage_within_a_handshake_is_refused_by_its_own_error_only(
    number: int, garbage: bytes, at: int
) -> None:
    dialer, acceptor = dialing(), accepting()
    sides = [acceptor, dialer]
    message = dialer.begin()
    changed = False
    with suppress(HandshakeError):
        for turn in range(4):
            if turn == number:
                changed = not (message[:at] + garbage).startswith(message)
                message = message[:at] + garbage
            message = sides[turn % 2].feed(message)
    assert dialer.peer is None or not changed
