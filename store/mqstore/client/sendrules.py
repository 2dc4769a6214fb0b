"""Rules that a message must obey before a producer sends it (clients#message-rules).

Most are rules of the log (`mqstore.log.outgoing`), which a put checks too. A producer checks them before it calls hooks
or gives a message to another thread, so that the caller gets the error at once. Topic and queue are checked when the
queue is chosen.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final, cast

from mqstore.broker.delay.routing import routed_properties
from mqstore.broker.road import SendOptions
from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.layout.properties import encode_properties
from mqstore.log.outgoing import OutgoingMessage, check_integer, checked_pairs, flat_body, key_words, no_such_option
from mqstore.options import Duration, seconds

__all__ = ["check_limits", "check_options", "check_size", "one_of", "options_of"]

MAX_PROPERTIES: Final = 128
MAX_PROPERTIES_BYTES: Final = 16 << 10

_UNSET: Final = {
    field.name: field.default for field in fields(OutgoingMessage) if field.name not in ("body", "topic", "queue_id")
}
"""Options of a put, each with the value that stands for "not given"."""


def options_of(message: OutgoingMessage) -> SendOptions:
    """Return the options of a put that a message has, without topic, body and queue."""
    given = {name: value for name, unset in _UNSET.items() if (value := getattr(message, name)) != unset}
    return cast(SendOptions, given)


def check_options(
    body: object, options: SendOptions, *, now_ms: int, max_delay: Duration, max_message_size: int
) -> bytes:
    """Check all of a message but its topic and queue. Return its body as bytes.
    Options that can be read only once are replaced by copies, as `check_limits` does.

    Raises InvalidMessageError, ConfigError for an unknown durability, and TypeError for an unknown option.
    """
    flat = flat_body(body)
    check_size(flat, max_message_size)
    if not options:
        return flat
    unknown = options.keys() - _UNSET.keys()
    if unknown:
        raise no_such_option(unknown, _UNSET)
    check_limits(options)
    check_integer(options.get("flag", 0), 32, "flag")
    one_of(options.get("durability"), "durability", (None, "append", "flush"))
    if options.get("compressed") not in (None, "zlib"):
        raise InvalidMessageError(f"compressed {options.get('compressed')!r} is not 'zlib'", "compressed")
    max_delay_ms = int(seconds(max_delay, "max_delay") * 1000)
    encode_properties(routed_properties(options, now_ms=now_ms, max_delay_ms=max_delay_ms))
    return flat


def check_size(body: bytes, max_message_size: int) -> None:
    if len(body) > max_message_size:
        raise InvalidMessageError(f"the body has {len(body)} bytes; max_message_size is {max_message_size}", "body")


def check_limits(options: SendOptions) -> None:
    """Check the size of tag, keys and properties.
    `keys` that can be read only once, and `properties` that may change, are replaced by copies."""
    keys, properties, tag = options.get("keys"), options.get("properties"), options.get("tag")
    texts: list[object] = [tag]
    if isinstance(keys, str):
        texts.append(keys)
    elif keys is not None:
        options["keys"] = keys = key_words(keys)
        texts += keys
    if properties:
        options["properties"] = properties = dict(checked_pairs(properties))
        if len(properties) > MAX_PROPERTIES:
            raise InvalidMessageError(
                f"the message has {len(properties)} properties; at most {MAX_PROPERTIES} are allowed", "properties"
            )
        texts += properties.keys()
        texts += properties.values()
    words = [text for text in texts if isinstance(text, str)]  # other types are refused elsewhere
    if 4 * sum(map(len, words)) <= MAX_PROPERTIES_BYTES:  # no character takes more than four bytes
        return
    size = sum(len(word.encode("utf-8", "surrogatepass")) for word in words)
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            f"properties, tag and keys take {size} bytes; at most {MAX_PROPERTIES_BYTES} are allowed", "properties"
        )


def one_of(value: object, name: str, allowed: tuple[str | None, ...]) -> None:
    """Raise ConfigError unless `value` is allowed for the option `name`."""
    if value not in allowed:
        raise ConfigError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")
