"""`host:port`, read and written in one way everywhere."""

import pytest

from photon.core.addresses import joined, mistake, parts, split


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("r0:7400", "r0", 7400),
        ("event_store-1.photon.test.:65535", "event_store-1.photon.test.", 65535),
        ("10.1.2.3:1", "10.1.2.3", 1),
        ("[::1]:7400", "::1", 7400),
        ("[::ffff:10.1.2.3]:7400", "::ffff:10.1.2.3", 7400),
        ("[fe80::1%eth0]:7400", "fe80::1%eth0", 7400),
    ],
)
def test_an_address_is_split_and_joined_again(text: str, host: str, port: int) -> None:
    assert mistake(text) is None
    assert split(text) == (host, port)
    assert parts(text) == (host, str(port))
    assert joined(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "r0", "r0:", ":7400", "r0:0", "r0:65536", "r0:-1", "r0:+1", "r0:1_0", "r0: 1", "r0:1\n"),
        *("ho st:1", "a/b:1", "dns:///r0:1", "r0:07400", "h:\u0667\u0664", "b\u00fccher:1", "h" * 254 + ":1"),
        *("[x:1", "x]:1", "[::1:1", "::1:7400", "[abc]:1", "[r0]:1", "[10.1.2.3]:1", "[]:1", "[::1]"),
    ],
)
def test_what_is_no_address_is_told_as_such(text: str) -> None:
    assert "is no address: give HOST:PORT" in str(mistake(text))
    with pytest.raises(ValueError, match="is no address"):
        split(text)


def test_one_of_any_length_is_refused_in_few_words() -> None:
    for text in ("h:" + "1" * 5000, "h" * 5000):
        assert len(str(mistake(text))) < 500


def test_brackets_are_given_once_and_to_ipv6_alone() -> None:
    assert joined("::1", 0) == joined("[::1]", 0) == "[::1]:0"
    assert joined("r0", "7400") == "r0:7400"
