"""What a message must be before a producer sends it (clients#message-rules).

    body            bytes of `max_message_size` at most, before compression; may be empty
    tag             a str without '|', not blank              keys          without spaces, not empty
    properties      no reserved names, nothing blank; 128 at most, 16 KiB with tag and keys, in UTF-8
    message_group   63 bytes at most                          delay         0 .. `max_delay`
    one at most of  message_group, delay, deliver_at, delay_level
    no text         with a control character

Most of that are the log's rules (`mqstore.log.outgoing`), which a put keeps by itself. A producer asks before it calls
hooks or hands a message to another thread, so that who made a mistake hears of it at once. Topic and queue are checked
where the queue is chosen.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final, cast

from mqstore.broker.delay.routing import routed_properties
from mqstore.broker.road import SendOptions
from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.layout.properties import encode_properties
from mqstore.log.outgoing import (
    OutgoingMessage,
    check_integer,
    checked_pairs,
    flat_body,
    key_words,
    no_such_option,
)
from mqstore.options import Duration, seconds

__all__ = ["check_limits", "check_options", "check_size", "one_of", "options_of"]

MAX_PROPERTIES: Final = 128
MAX_PROPERTIES_BYTES: Final = 16 << 10

_UNSET: Final = {
    field.name: field.default for field in fields(OutgoingMessage) if field.name not in ("body", "topic", "queue_id")
}
"""The options of a put, each with the value that says it was not given."""


def options_of(message: OutgoingMessage) -> SendOptions:
    """What a message says beside topic, body and queue, as the options of a put."""
    given = {name: value for name, unset in _UNSET.items() if (value := getattr(message, name)) != unset}
    return cast(SendOptions, given)


def check_options(
    body: object, options: SendOptions, *, now_ms: int, max_delay: Duration, max_message_size: int
) -> bytes:
    """Check all of a message but its topic and queue; its body as bytes. As `check_limits` it makes the options last.

    Raises InvalidMessageError, ConfigError for a durability that there is not, TypeError for an unknown option.
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
    """How much a message may say about itself. `keys` that can be read only once, and `properties` that may change, are
    replaced by copies."""
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
    words = [text for text in texts if isinstance(text, str)]  # what is no text is refused by its own rule
    if 4 * sum(map(len, words)) <= MAX_PROPERTIES_BYTES:  # no character takes more
        return
    size = sum(len(word.encode("utf-8", "surrogatepass")) for word in words)
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            f"properties, tag and keys take {size} bytes; at most {MAX_PROPERTIES_BYTES} are allowed", "properties"
        )


def one_of(value: object, name: str, allowed: tuple[str | None, ...]) -> None:
    """ConfigError unless `value` is allowed for the option `name`."""
    if value not in allowed:
        raise ConfigError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")
