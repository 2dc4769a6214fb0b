"""Access keys: users with a secret, and their rights on topics and groups (remoting-server, section 18).

The file is TOML, readable only by its owner. A name may end with `*`::

    [shop]                              # access key
    secret = "a long random text"
    pub = ["orders", "pay*"]            # topics to send to
    sub = ["orders"]                    # topics to read
    groups = ["billing", "shop-*"]      # groups to consume in

    [operator]
    secret = "another one"
    admin = true                        # everything

A request is signed (`remoting/signing.py`). Connections of the Unix socket need no signature. A request that `_NEEDS`
does not name is for administrators.
"""

from __future__ import annotations

import hmac
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.tables.names import DLQ_PREFIX, RETRY_PREFIX
from mqstore.errors import ConfigError, NotPermittedError
from mqstore.logger import log as _log
from mqstore.remoting.codes import DEFAULT_TOPIC, Code
from mqstore.remoting.shapes import dumps, loads, read_body
from mqstore.remoting.signing import ACCESS_KEY, SIGNATURE, bytes_of, signature_of

if TYPE_CHECKING:
    from mqstore.remoting.frames import Frame
    from mqstore.serve.connection import Call

Needs = Iterator[tuple[str, str]]
"""Rights, as ("pub", topic), ("sub", topic), ("any", topic) or ("group", name)."""
_BYTES_MAX: Final = 1 << 20
_LISTS: Final = ("pub", "sub", "groups")
_VERBS: Final = {"pub": "send to topic", "sub": "read topic", "any": "use topic", "group": "consume in group"}

_SEND, _READ = "pub:topic", "group:consumerGroup sub:topic"
_NEEDS: Final[Mapping[int, str]] = {
    **dict.fromkeys((Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE), _SEND),
    **dict.fromkeys((Code.SEND_REPLY_MESSAGE, Code.SEND_REPLY_MESSAGE_V2, Code.RECALL_MESSAGE), _SEND),
    Code.END_TRANSACTION: _SEND,  # without a topic: it has been prepared by a user with the right to send
    **dict.fromkeys((Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.POP_MESSAGE, Code.ACK_MESSAGE), _READ),
    **dict.fromkeys((Code.CHANGE_MESSAGE_INVISIBLETIME, Code.PEEK_MESSAGE, Code.NOTIFICATION), _READ),
    **dict.fromkeys((Code.POLLING_INFO, Code.QUERY_CONSUMER_OFFSET, Code.UPDATE_CONSUMER_OFFSET), _READ),
    # Of RocketMQ's request headers: a consumer that may not send can still give a message back.
    Code.CONSUMER_SEND_MSG_BACK: "group:group",
    Code.GET_CONSUMER_LIST_BY_GROUP: "group:consumerGroup",
    Code.UNREGISTER_CLIENT: "group:consumerGroup",
    **dict.fromkeys((Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP), "any:topic"),
    **dict.fromkeys((Code.GET_EARLIEST_MSG_STORETIME, Code.GET_ROUTEINFO_BY_TOPIC), "any:topic"),
    Code.QUERY_MESSAGE: "sub:topic",
    Code.GET_BROKER_CLUSTER_INFO: "",
    Code.HEART_BEAT: "",  # reduced to what the user may do
}
"""Rights that each request needs, with the field that names the topic or group. An absent field needs none."""
_BODIES: Final[Mapping[int, str]] = {
    **dict.fromkeys((Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ), "group:consumerGroup sub:mqSet[].topic"),
    Code.CHECK_CLIENT_CONFIG: "group:group sub:subscriptionData.topic",
    Code.QUERY_ASSIGNMENT: "group:consumerGroup sub:topic",
    Code.BATCH_ACK_MESSAGE: "group:acks[].c sub:acks[].t",
}
"""The same for requests that name topics and groups in their body. `[]` is for each item of a list."""


@dataclass(frozen=True, slots=True)
class _User:
    secret: bytes
    pub: tuple[str, ...] = ()
    sub: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    admin: bool = False

    def may(self, kind: str, name: str) -> bool:
        """Return True if the user has a right."""
        if self.admin:
            return True
        if kind == "group":
            return _matches(self.groups, name)
        if kind == "any":
            return name == DEFAULT_TOPIC or self.may("pub", name) or self.may("sub", name)
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if name.startswith(prefix):
                return self._owns(name.removeprefix(prefix))
        return _matches(self.pub if kind == "pub" else self.sub, name)

    def _owns(self, rest: str) -> bool:
        """Return True for a retry topic of one of the groups: `group`, or `group+topic` or `group_topic` of a pop."""
        pairs = ((rest[:at], rest[at + 1 :]) for at, letter in enumerate(rest) if letter in "+_")
        return _matches(self.groups, rest) or any(
            _matches(self.groups, group) and _matches(self.sub, topic) for group, topic in pairs
        )


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


_NOBODY: Final = _User(b"nobody")


class Users:
    """Users of a server, and their rights."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if others can read it, or if something in it is wrong."""
        self._users = _read(path)

    def check(self, call: Call) -> None:
        """Raise NotPermittedError for a request without a right signature, or with one of a user without the right.
        A heartbeat loses the groups and subscriptions that its user may not have."""
        frame = call.frame
        key = frame.fields.get(ACCESS_KEY, "")
        user = self._users.get(key, _NOBODY)
        # Also for an unknown key, so that the time of the answer does not say which one it is.
        signed = hmac.compare_digest(signature_of(user.secret, frame), bytes_of(frame.fields.get(SIGNATURE, "")))
        if not signed or user is _NOBODY:
            raise NotPermittedError("the request has no signature of a known access key")
        if frame.code == Code.HEART_BEAT:
            _reduce(frame, user, key)
        for kind, name in _needs(call):
            if not user.may(kind, name):
                raise NotPermittedError(f"the access key {key!r} may not {_VERBS.get(kind, kind)} {name!r}")


def _needs(call: Call) -> Needs:
    code = call.frame.code
    if (text := _BODIES.get(code)) is not None:
        body = loads(call.frame.body)
        with read_body():
            yield from [(kind, str(name)) for kind, path in _rights(text) for name in _named(body, path)]
    elif (text := _NEEDS.get(code)) is not None:
        yield from ((kind, name) for kind, field in _rights(text) if (name := call.values[field]) is not None)
    else:
        yield "ask for", f"request {code}"


def _rights(text: str) -> Iterator[list[str]]:
    return (each.split(":") for each in text.split())


def _named(value: Any, path: str) -> list[Any]:
    """Return the members of a body at a path of `_BODIES`. Raises KeyError, TypeError or AttributeError."""
    name, _, rest = path.partition(".")
    found = value.get(name[:-2]) or () if name.endswith("[]") else [value[name]]
    return [each for item in found for each in _named(item, rest)] if rest else list(found)


def _reduce(frame: Frame, user: _User, key: str) -> None:
    """Leave in a heartbeat only the groups and topics that the user may consume."""
    body = loads(frame.body)
    kept, dropped = [], []
    with read_body():
        for consumer in body.get("consumerDataSet") or ():
            topics = consumer.get("subscriptionDataSet") or ()
            allowed = [each for each in topics if user.may("sub", str(each["topic"]))]
            dropped += [each["topic"] for each in topics if each not in allowed]
            if user.may("group", str(consumer["groupName"])):
                kept.append({**consumer, "subscriptionDataSet": allowed})
            else:
                dropped.append(consumer["groupName"])
    if dropped:
        _log.warning("a heartbeat of access key %r loses %.500s: no right to consume", key, dropped)
    frame.body = dumps({**body, "consumerDataSet": kept})


def _read(path: Path) -> dict[str, _User]:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{path} has secrets and other users can use it: run `chmod 600 {path}`")
        data = file.read(_BYTES_MAX + 1)
    try:
        if len(data) > _BYTES_MAX:
            raise ValueError(f"more than {_BYTES_MAX} bytes")
        users = {name: _user(entry) for name, entry in tomllib.loads(data.decode()).items()}
    except ValueError as error:  # also of tomllib, and UnicodeDecodeError
        raise ConfigError(f"{path}: {error}") from None
    if not users:
        raise ConfigError(f"{path} has no user")
    return users


def _user(entry: Any) -> _User:
    if not isinstance(entry, dict):
        raise ValueError("a user is a table, such as [shop]")
    values = dict(entry)
    secret, admin = values.pop("secret", None), values.pop("admin", False)
    lists = {name: values.pop(name, []) for name in _LISTS}
    if values:
        raise ValueError(f"unknown setting {next(iter(values))!r} of a user: there are secret, pub, sub, groups, admin")
    if not isinstance(secret, str) or not secret or not isinstance(admin, bool):
        raise ValueError("a user needs a secret, which is a text that is not empty, and admin is true or false")
    for name, each in lists.items():
        if not isinstance(each, list) or not all(isinstance(item, str) and item for item in each):
            raise ValueError(f"{name} of a user is a list of names")
    rights = {name: tuple(each) for name, each in lists.items()}
    return _User(secret.encode(), admin=admin, **rights)
