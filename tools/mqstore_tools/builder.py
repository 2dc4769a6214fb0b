"""Recipes of `mqstore produce`: which field of an input record is the body, a key, a property."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import click

from mqstore import MQStoreError, OutgoingMessage
from mqstore.admin import check_message
from mqstore.engine import user_properties

Format = Literal["lines", "jsonl", "csv", "file"]


class NoMessage(Exception):  # noqa: N818
    """Reason why a line cannot become a message."""


Record = bytes | dict[str, Any] | NoMessage
"""A body, the fields of a JSON object or row, or the reason why the line cannot be read."""


@dataclass
class Recipe:
    """Recipe from record to message. `texts` are the options --tag, --message-group and --unique-key."""

    format: Format
    texts: Mapping[str, str | None]
    keys: Sequence[str]
    properties: Mapping[str, str]
    delay: float | None
    body_field: str
    exported: bool
    body_is_record: bool
    max_message_size: int | None = None
    """Largest body. None: that of a new store."""

    def __post_init__(self) -> None:
        self._texts = {name: _source(value) for name, value in self.texts.items() if value is not None}
        self._keys = [_source(value) for value in self.keys]
        self._properties = {name: _source(value) for name, value in self.properties.items()}
        fields = [is_field for is_field, _ in (*self._texts.values(), *self._keys, *self._properties.values())]
        if self.format in ("lines", "file"):
            if any(fields):
                raise click.UsageError("@FIELD needs --format jsonl or csv; write @@ for one @")
            if self.body_is_record:
                raise click.UsageError("--body-is-record is for --format jsonl and csv")
        if self.exported and (self.body_is_record or self.body_field != "body"):
            raise click.UsageError("--exported chooses the body: leave out --body-is-record and --body-field")
        self._constant = None if any(fields) else self._checked(b"", self._options({}))

    def _checked(self, body: bytes, options: dict[str, Any]) -> OutgoingMessage:
        message = OutgoingMessage(body, **options)
        check_message(message, self.max_message_size)
        return message

    def message(self, record: Record) -> OutgoingMessage:
        """Return the checked message of a record. Raises `NoMessage` with the reason."""
        if isinstance(record, NoMessage):
            raise record
        try:
            if isinstance(record, bytes):
                assert self._constant is not None
                message = replace(self._constant, body=record)
                if len(record) > (self.max_message_size or 0):
                    check_message(message, self.max_message_size)
                return message
            if self.exported:
                record = _imported(record)
            return self._checked(self._body(record), self._options(record))
        except (MQStoreError, TypeError, ValueError) as error:
            raise NoMessage(str(error)) from error

    def _body(self, record: dict[str, Any]) -> bytes:
        if self.body_is_record:
            return _compact(record)
        if self.body_field not in record:
            raise NoMessage(
                f"no field {self.body_field!r} for the body; name another with --body-field, or --body-is-record"
            )
        value = record[self.body_field]
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return value.encode("utf-8", "surrogateescape" if self.format == "csv" else "strict")
        return _compact(value)

    def _options(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a put that the command line and the record give."""
        options: dict[str, Any] = {}
        for name in ("tag", "message_group", "unique_key"):
            given = self._texts.get(name)
            value = _text(record, name) if given is None else _value(record, given)
            if value is not None:
                options[name] = value
        keys = [key for each in self._keys if (key := _value(record, each)) is not None] or _own_keys(record)
        if keys:
            options["keys"] = tuple(keys)
        properties = _own_properties(record)
        for name, given in self._properties.items():
            value = _value(record, given)
            if value is not None:
                properties.setdefault(name, value)
        if properties:
            options["properties"] = properties
        for name, kind in (("delay", float), ("deliver_at", float), ("delay_level", int), ("flag", int)):
            number = self.delay if name == "delay" and self.delay is not None else _number(record, name, kind)
            if number is not None:
                options[name] = number
        return options


_Source = tuple[bool, str]
"""(True for the name of a field, the name or the value)."""


def _source(value: str) -> _Source:
    if value.startswith("@@"):
        return False, value[1:]
    return (True, value[1:]) if value.startswith("@") else (False, value)


def _value(record: Mapping[str, Any], source: _Source) -> str | None:
    is_field, text = source
    return _text(record, text) if is_field else text


def _text(record: Mapping[str, Any], name: str) -> str | None:
    """Return a field as text, or None if it is missing or empty."""
    value = record.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise NoMessage(f"field {name!r} is neither text nor a number")
    return str(value)


def _number(record: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> float | None:
    text = _text(record, name)
    try:
        return None if text is None else kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise NoMessage(f"field {name!r} is not a {what}: {text!r}") from None


def _own_keys(record: Mapping[str, Any]) -> list[str]:
    """Return the keys in the fields `key` and `keys`. The latter is a list, or words."""
    several = record.get("keys")
    if isinstance(several, list):
        found = [text for i in range(len(several)) if (text := _text({"keys": several[i]}, "keys")) is not None]
    else:
        found = (_text(record, "keys") or "").split()
    own = _text(record, "key")
    return found if own is None else [own, *found]


_PROPERTY = "property."
_MESSAGE_GROUP = "__SHARDINGKEY"
"""Stored property with the message group."""


def _own_properties(record: Mapping[str, Any]) -> dict[str, str]:
    given = _object_field(record, "properties")
    found = {name: text for name in given if (text := _text(given, name)) is not None}
    for name in record:
        if name.startswith(_PROPERTY) and (text := _text(record, name)) is not None:
            found[name.removeprefix(_PROPERTY)] = text
    return found


def _imported(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `mqstore export` as a record, without its old queue and offset."""
    stored = _object_field(row, "properties")
    try:
        body = base64.b64decode(row.get("body", ""), validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise NoMessage(f"field 'body' is not base64: {error}") from error
    return {
        "body": body,
        "tag": row.get("tags"),
        "keys": row.get("keys"),
        "unique_key": row.get("unique_key"),
        "flag": row.get("flag") or None,
        "message_group": stored.get(_MESSAGE_GROUP),
        "properties": user_properties(stored),
    }


def _object_field(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name) or {}
    if not isinstance(found, dict):
        raise NoMessage(f"field {name!r} is not an object")
    return found


def _compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
