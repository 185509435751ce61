"""What source and sink of Kafka have in common: the client's settings, and its errors in our words."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection, Uuid

from photon.connect.uris import Uri
from photon.core.errors import PhotonError, UnavailableError, UsageError

log: Final = logging.getLogger("photon.kafka")
ASK_S: Final = 10.0
"""For one question to the brokers."""
_FILE: Final = "config"
_NO_ID: Final = str(Uuid(0, 0))
_NEVER_WORKS: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.INVALID_CONFIG,
        KafkaError.TOPIC_EXCEPTION,
    }
)


def topic_of(uri: Uri) -> str:
    """UsageError where the URI names no broker or no topic."""
    if not uri.place or not uri.path or "/" in uri.path:
        raise UsageError(f"{uri.shown}: write kafka://HOST:PORT[,HOST:PORT]/TOPIC")
    return uri.path


def client_settings(uri: Uri, own: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """librdkafka's settings that the URI carries, and the options that are `own`.

    `config` names a file of them, a `name=value` a line, as Kafka's own tools read it: for what is secret.
    Names with a dot are librdkafka's. UsageError.
    """
    settings: dict[str, Any] = {"bootstrap.servers": uri.place}
    if _FILE in uri.options:
        settings |= _read(Path(uri.options[_FILE]), uri)
    mine: dict[str, str] = {}
    for name, value in uri.options.items():
        if "." in name and not any(name.startswith(f"{one}.") for one in own):
            settings[name] = value
        elif name.partition(".")[0] in own:
            mine[name] = value
        elif name != _FILE:
            known = ", ".join(sorted({*own, _FILE}))
            raise UsageError(
                f"{uri.shown}: unknown option '{name}'; known are {known} and librdkafka's settings, "
                "whose names have dots"
            )
    settings["logger"] = log
    settings["error_cb"] = lambda error: log.info("%s: %s", uri.shown, error.str())
    return settings, mine


def made(uri: Uri, make: Any, settings: dict[str, Any]) -> Any:
    """A client of these settings. UsageError for those that librdkafka does not know."""
    try:
        return make(settings)
    except (KafkaException, ValueError, TypeError) as error:
        raise UsageError(f"{uri.shown}: {_text(error)}") from error


def id_of(uri: Uri, admin: Any) -> str:
    """The id that the topic has now, which one made anew has not; "" where the brokers know none.
    UnavailableError, UsageError."""
    topic = topic_of(uri)
    try:
        known = admin.describe_topics(TopicCollection([topic]), request_timeout=ASK_S)[topic].result()
    except KafkaException as error:
        raise in_words(uri, error) from error
    return "" if str(known.topic_id) == _NO_ID else str(known.topic_id)


def in_words(uri: Uri, error: KafkaException | KafkaError) -> PhotonError:
    """The error to raise."""
    one = error.args[0] if isinstance(error, KafkaException) else error
    if isinstance(one, KafkaError) and one.code() in _NEVER_WORKS:
        return UsageError(f"{uri.shown}: {one.str()}")
    if isinstance(one, KafkaError) and one.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        mend = "raise message.max.bytes of the sink and max.message.bytes of the topic"
        return UnavailableError(f"{uri.shown}: {one.str()}; {mend}; tried again")
    return UnavailableError(f"{uri.shown}: {_text(error)}; tried again")


def runs_of(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending offsets -> the first and the last of each run without a gap."""
    jumps = [i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 1]
    return [(offsets[a], offsets[b - 1]) for a, b in pairwise([0, *jumps, len(offsets)])]


def _text(error: object) -> str:
    one = error.args[0] if isinstance(error, Exception) and error.args else error
    return str(one.str() if isinstance(one, KafkaError) else one)


def _read(path: Path, uri: Uri) -> dict[str, str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{uri.shown}: its config {path} cannot be read ({error})") from error
    found = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith(("#", "!")):
            name, equals, value = line.partition("=")
            if not equals:
                raise UsageError(f"{path}: line {number} is no name=value")
            found[name.strip()] = value.strip()
    return found
