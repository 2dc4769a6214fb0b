"""Topics: names, queue counts, permissions and attributes (delivery#topics, delivery#system-names).

A topic is entered (in `config/topics.json`), or found: it has consume queues, but no entry.

    unknown --create, ensure, for_send--> entered --delete--> unknown, its messages are hidden
    found --alter, ensure--> entered;  found --delete--> unknown

Deletion first removes the messages (`MessageStore.delete_topics`), then offsets, then the entry. A crash in between
leaves an empty topic, or offsets in an unknown one, which can be deleted again.

A put costs one dict look-up here: `_sendable` has only topics that users may send to. The store is never called under
the table's lock, because it may dispatch, and call waiters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mqstore.broker.tables.configfile import NOTHING, ConfigTable, data_version, entries, member, object_member
from mqstore.broker.tables.names import (
    DEAD_LETTER,
    DROP,
    EXPIRY,
    KEPT_NAMES,
    RETRY_PREFIX,
    check_user_topic,
    is_retry_topic,
    is_system_topic,
    retry_topic,
)
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.priorities import give_priorities
from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError, TopicNotFoundError
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.reader import StoreReader

PERM_INHERIT, PERM_WRITE, PERM_READ = 1, 2, 4
_PERM_MAX = PERM_READ | PERM_WRITE | PERM_INHERIT
QUEUES_MAX = 16_384
"""Maximum number of queues that may be requested. A file that is read may have more."""

MESSAGE_TYPES = ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED")

_TYPE = "message.type"

# Member of the file -> field, type, and RocketMQ's default.
_MEMBERS: dict[str, tuple[str, type, Any]] = {
    "readQueueNums": ("read_queues", int, 16),
    "writeQueueNums": ("write_queues", int, 16),
    "perm": ("perm", int, 6),
    "order": ("order", bool, False),
    "attributes": ("attributes", dict, NOTHING),
}


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """Configuration of a topic (delivery#topics).

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     topic = store.broker.topics.create("orders", queues=8, message_type="FIFO")
    ...     topic.name, topic.write_queues, topic.writable, topic.message_type
    ('orders', 8, True, 'FIFO')
    """

    name: str
    read_queues: int = 4
    """Consumers read queues 0..read_queues-1."""
    write_queues: int = 4
    """Producers write to queues 0..write_queues-1."""
    perm: int = PERM_READ | PERM_WRITE
    """Sum of 4 (readable), 2 (writable) and 1 (RocketMQ's template for others)."""
    order: bool = False
    """Hint for clients that the order of queues matters. No effect here."""
    attributes: Mapping[str, str] = field(default_factory=lambda: NOTHING, hash=False)
    unknown: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False, repr=False)
    """Members of the file's entry that have no effect here. They are written back."""

    @property
    def readable(self) -> bool:
        """True if `perm` has 4 (READ)."""
        return self.perm & PERM_READ != 0

    @property
    def writable(self) -> bool:
        """True if `perm` has 2 (WRITE)."""
        return self.perm & PERM_WRITE != 0

    @property
    def queue_ids(self) -> Sequence[int]:
        """Queues that consumers read, in the order in which members divide them."""
        return range(self.read_queues)

    @property
    def message_type(self) -> str:
        """One of `MESSAGE_TYPES`. UNSPECIFIED if none is set, or only a newer RocketMQ knows it."""
        found = self.attributes.get(_TYPE, "UNSPECIFIED")
        return found if found in MESSAGE_TYPES else "UNSPECIFIED"

    @property
    def by_priority(self) -> bool:
        """True if the id of a queue is the priority of its messages (delivery#priority)."""
        return self.attributes.get(_TYPE) == "PRIORITY"

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `topics.json`."""
        entry = {**self.unknown, "topicName": self.name}
        for key, (name, _, _) in _MEMBERS.items():
            entry[key] = getattr(self, name)
        entry["attributes"] = dict(self.attributes)
        return entry

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> TopicConfig:
        """Read an entry of `topics.json`. Raises ValueError for a value of the wrong type."""
        known = {field: member(entry, key, kind, default) for key, (field, kind, default) in _MEMBERS.items()}
        if not all(type(value) is str for value in known["attributes"].values()):
            raise ValueError(f"attributes must be strings, not {known['attributes']!r:.80}")
        unknown = {key: value for key, value in entry.items() if key not in _MEMBERS and key != "topicName"}
        return cls(name, **known, unknown=unknown)


def check_queue(config: TopicConfig, queue_id: object) -> int:
    """Return the queue to put to, if it is one of the topic's. Raises InvalidMessageError: no consumer would read it.
    A queue that is read, but no longer written, may be named: messages for it may be on their way."""
    queues = max(config.write_queues, config.read_queues)
    if type(queue_id) is not int or not 0 <= queue_id < queues:
        raise InvalidMessageError(
            f"queue_id must be 0..{queues - 1}, the queues of {config.name!r}, got {queue_id!r}", "queue_id"
        )
    return queue_id


class TopicTable(ConfigTable):
    """Table of all topics of a store. Thread-safe."""

    def __init__(self, store: StoreReader, offsets: OffsetTable) -> None:
        """Load the file. Raises CorruptStoreError if no good copy of it is left, StoreIOError."""
        super().__init__(store, "topics.json", check_topics)
        self.group_names: Callable[[], Collection[str]] = tuple
        """Function that returns every known group. Set by the owner of the groups."""
        self.in_order: list[Callable[[str, str], bool]] = []
        """Functions called by `alter` that return True if a group relies on the order of a topic.
        They get (group, topic) of a group with committed offsets. Every group of a FIFO topic relies on it anyway."""
        self._store = store
        self._offsets = offsets
        self._auto_create = store.config.auto_create_topics
        self._default_queues = store.config.default_queues
        self._foreign: dict[str, Any] = {}
        self._entered: dict[str, TopicConfig] = {}
        # Look-ups add to the last three: _known gets topics that were found, the others those that were sent to.
        self._known: dict[str, TopicConfig] = {}
        self._sendable: dict[str, TopicConfig] = {}
        self._with_priorities: dict[str, TopicConfig] = {}
        self._load()

    # -- looking up -------------------------------------------------------------------------------------------------

    def get(self, name: str) -> TopicConfig | None:
        """Return the topic, entered or found, or None."""
        return self._known.get(name) or self._find(name)

    def entered(self, name: str) -> TopicConfig | None:
        """Return the topic's entry in the table, or None if there is none."""
        return self._entered.get(name)

    def require(self, name: str) -> TopicConfig:
        """Return the topic, entered or found. Raises TopicNotFoundError without one."""
        config = self.get(name)
        if config is None:
            raise TopicNotFoundError(f"{self._store.path} has no topic {name!r}; create it, or put a message to it")
        return config

    def for_send(self, name: str) -> TopicConfig:
        """Return the topic that a user sends to, and create it if necessary (delivery#auto-create).
        Raises NotPermittedError for a system or retry topic and for a topic that is not writable. Raises
        TopicNotFoundError for an unknown one if `auto_create_topics` is off, InvalidMessageError for an invalid name,
        and the errors of `create`."""
        return self._sendable.get(name) or self._admit(name)

    def for_priority(self, name: str) -> TopicConfig:
        """Return the topic `name`, whose queues are priorities. A new one, or one with one queue, is made such a topic.
        Groups begin at the first message of each new queue. Raises ConfigError for a topic with several queues, or
        that a group consumes in order, and the errors of `for_send` and `alter`."""
        if (config := self._with_priorities.get(name)) is None:
            known = self._with_priorities  # first, as in _find
            config = known[name] = give_priorities(self, self._offsets, name)
        return config

    def names(self, system: bool = False) -> list[str]:
        """Return the topic names, entered and found, sorted. They include retry and dead-letter topics.
        System topics are included only if `system` is true."""
        return [config.name for config in self.configs() if system or not is_system_topic(config.name)]

    def configs(self) -> list[TopicConfig]:
        """Return every topic, system topics included, by name."""
        entered = self._entered
        found = (self._found(name) for name in self._store.topics() if name not in entered)
        return sorted([*entered.values(), *filter(None, found)], key=lambda config: config.name)

    def _find(self, name: str) -> TopicConfig | None:
        known = self._known  # first, so that the result of an outdated look-up is added to the old dict
        config = known.get(name) or self._found(name)
        if config is None:
            return None
        known[name] = config
        # A topic may have been created, and got its first messages, since the first line.
        return config if known is self._known else self._find(name)

    def _found(self, name: str) -> TopicConfig | None:
        """Return the configuration of a topic without an entry, by its queues, or None."""
        try:
            count = self._store.queues(name)[-1].queue_id + 1
        except TopicNotFoundError:
            return None
        return TopicConfig(name, count, count)

    def _admit(self, name: object) -> TopicConfig:
        if not isinstance(name, str):
            raise InvalidMessageError(f"topic must be a str, not {type(name).__name__}", "topic")
        if is_system_topic(name):
            raise NotPermittedError(f"topic {name!r} is a system topic; choose another name")
        if is_retry_topic(name):
            raise NotPermittedError(f"topic {name!r} is a retry topic; only Broker.send_back puts messages there")
        sendable = self._sendable  # first, as in _find
        config = self.get(name) or self._create_to_send(name)
        if not config.writable:
            raise NotPermittedError(f"topic {name!r} may not be written to (perm {config.perm}); alter it to 6")
        if config.write_queues < 1:  # only a file can have this
            raise NotPermittedError(f"topic {name!r} has {config.write_queues} queues to write; increase write_queues")
        sendable[name] = config
        return config

    def _create_to_send(self, name: str) -> TopicConfig:
        check_user_topic(name)
        if not self._auto_create:
            raise TopicNotFoundError(
                f"{self._store.path} has no topic {name!r}, and auto_create_topics is off; create it first"
            )
        return self._enter_if_absent(TopicConfig(name, self._default_queues, self._default_queues))

    # -- changing ---------------------------------------------------------------------------------------------------

    def ensure(self, name: str, queues: int = 1) -> TopicConfig:
        """Return a topic for the engine's own use. A missing one is created with `queues` queues.
        Raises InvalidMessageError for a name that cannot be a path, and the errors of `create`."""
        config = self._entered.get(name)
        if config is not None:
            return config
        if not is_path_safe(name) or "@" in name:
            raise InvalidMessageError(
                f"topic {name[:300]!r} must be 1 to 255 bytes without '@', '/' and control characters", "topic"
            )
        return self._enter_if_absent(TopicConfig(name, queues, queues), grow=True)

    def ensure_queues(self, name: str, queues: int) -> TopicConfig:
        """Return a topic as `ensure` does. One with fewer queues than `queues` gets that many."""
        config = self.ensure(name, queues)
        return config if config.read_queues >= queues else self.alter(name, queues=queues)

    def create(
        self,
        name: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = PERM_READ | PERM_WRITE,
        message_type: str | None = None,
        exist_ok: bool = True,
    ) -> TopicConfig:
        """Create a topic. With `exist_ok` an existing one is returned unchanged, otherwise it is an error.

        `queues` (default: `default_queues`) replaces a missing `read_queues` or `write_queues`. `message_type` is one
        of `MESSAGE_TYPES`. Raises ConfigError for an existing topic, a count outside 1..16,384, and an invalid `perm`
        or message type. Raises InvalidMessageError for an invalid name, NotPermittedError for a system topic,
        StoreFullError and StoreIOError if it cannot be saved."""
        check_user_topic(name)
        count = self._default_queues if queues is None else queues
        config = TopicConfig(
            name,
            count if read_queues is None else read_queues,
            count if write_queues is None else write_queues,
            perm,
            attributes=_attributes(NOTHING, message_type),
        )
        _check_wish(config)
        return self._enter_if_absent(config, exist_ok=exist_ok)

    def alter(
        self,
        name: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        order: bool | None = None,
        message_type: str | None = None,
        force: bool = False,
    ) -> TopicConfig:
        """Change the given settings. `queues` sets both numbers of queues, as in `create`.

        To remove queues, first lower `write_queues`, wait until the queues are drained, and then lower `read_queues`.
        Without `force` a change that would hide messages in such queues is a ConfigError. So is another number of write
        queues while a group that relies on order has committed offsets in the topic, because message groups would move
        to other queues. Raises TopicNotFoundError without such a topic, NotPermittedError for a system topic, and the
        errors of `create`."""
        self._refuse_system(name, "altered")
        given: dict[str, Any] = {
            "read_queues": queues if read_queues is None else read_queues,
            "write_queues": queues if write_queues is None else write_queues,
            "perm": perm,
            "order": order,
        }
        changes = {key: value for key, value in given.items() if value is not None}

        def change(old: TopicConfig) -> TopicConfig:
            new = replace(old, **changes, attributes=_attributes(old.attributes, message_type))
            _check_wish(new, old)
            if not force and (new.read_queues, new.write_queues) != (old.read_queues, old.write_queues):
                self._refuse_hiding(old, new)
                self._refuse_moving(old, new)
            return new

        return self._change(name, change)

    def expire(self, name: str, dead_letter: bool | None = None) -> TopicConfig:
        """Have messages of a topic expire, and then dropped, or put to the dead letters with `dead_letter`.
        None keeps the topic's choice. Raises the errors of `require`, and of `create` for the file."""
        given = None if dead_letter is None else DEAD_LETTER if dead_letter else DROP
        return self._set(name, EXPIRY, lambda known: given or known or DROP)

    def keep_names(self, name: str, duration_s: int) -> TopicConfig:
        """Have retention keep the names of a topic's items for this time or longer. Raises the errors of `expire`.
        The time is a power of two, so that many different times change the file a few times."""
        wanted = 1 << max(0, duration_s - 1).bit_length()
        return self._set(name, KEPT_NAMES, lambda known: str(max(wanted, int(known or 0))))

    def _set(self, name: str, attribute: str, choose: Callable[[str | None], str]) -> TopicConfig:
        def change(old: TopicConfig) -> TopicConfig:
            known = old.attributes.get(attribute)
            chosen = choose(known)
            attributes = MappingProxyType({**old.attributes, attribute: chosen})
            return old if chosen == known else replace(old, attributes=attributes)

        return self._change(name, change)

    def _change(self, name: str, change: Callable[[TopicConfig], TopicConfig]) -> TopicConfig:
        while True:
            old = self.require(name)
            if (new := change(old)) is old:
                return old
            with self._lock:
                if self._known.get(name) is old:  # else another thread has changed it: check again
                    self._write({**self._entered, name: new})
                    break
        self._notify(name)
        return new

    def delete(self, name: str, *, force: bool = False) -> None:
        """Delete a topic, its messages, all groups' offsets in it, and its pop retry topics.

        Disk space is freed as segments are deleted. A message that is put meanwhile may create the topic again, with
        only itself. Raises TopicNotFoundError, NotPermittedError for a system topic, and without `force` ConfigError
        while a group has committed offsets in it. If it cannot be saved, raises the errors of
        `MessageStore.delete_topics`, `OffsetTable.save` and `create`. The topic may then be empty, and can be deleted
        again."""
        self._refuse_system(name, "deleted")
        groups = self._offsets.groups_of(name)
        if not groups:
            self.require(name)
        elif not force:
            raise ConfigError(
                f"topic {name!r} is consumed by {', '.join(sorted(groups))}; `force` deletes it, and messages that "
                f"they have not consumed are lost"
            )
        known = self.group_names()

        def of_this(rest: str) -> bool:
            if rest.endswith("_" + name):
                return {topic for _, topic in self._owners(rest, known)} == {name}
            return rest.endswith("+" + name)

        retries = [each for each in self.names() if is_retry_topic(each) and of_this(each[len(RETRY_PREFIX) :])]
        self._remove([name, *retries])

    def delete_retries(self, group: str) -> None:
        """Delete the retry topics of a deleted group. Raises the errors of `delete`.
        Its dead letters stay, and topics that may belong to another group."""
        known = {*self.group_names(), group}

        def of_this(rest: str) -> bool:
            if rest == group or rest.startswith(group + "_"):
                return {owner for owner, _ in self._owners(rest, known)} == {group}
            return rest.startswith(group + "+")

        own = retry_topic(group)
        self._remove([each for each in self.names() if each.startswith(own) and of_this(each[len(RETRY_PREFIX) :])])

    def _owners(self, name: str, groups: Collection[str]) -> set[tuple[str, str | None]]:
        """Return (group, topic) of the owners whose retries may be in `%RETRY%name` (delivery#pop-queues).
        The group `name` has topic None. In version 1 of pop, `name` may also be a group and a topic joined by `_`."""
        owners: set[tuple[str, str | None]] = {(name, None)} if name in groups else set()
        at = name.find("_")
        while at > 0:
            if name[:at] in groups and self.get(name[at + 1 :]) is not None:
                owners.add((name[:at], name[at + 1 :]))
            at = name.find("_", at + 1)
        return owners

    def _remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        self._file.writable().delete_topics(names)
        self._offsets.remove_topics(names)
        with self._lock:
            self._write({key: value for key, value in self._entered.items() if key not in names})
        for deleted in names:
            self._notify(deleted)

    def _refuse_system(self, name: str, what: str) -> None:
        if is_system_topic(name):
            raise NotPermittedError(f"topic {name!r} is a system topic and cannot be {what}")

    def _refuse_hiding(self, old: TopicConfig, new: TopicConfig) -> None:
        reason = None
        if new.write_queues > new.read_queues:
            reason = f"messages in queues {new.read_queues}..{new.write_queues - 1} would be written and never read"
        elif new.read_queues < old.write_queues and new.read_queues < old.read_queues:
            reason = f"producers still write to queues up to {old.write_queues - 1}; lower write_queues first"
        elif hidden := [q for q in range(new.read_queues, old.read_queues) if self._undrained(new.name, q)]:
            reason = f"queues {', '.join(map(str, hidden[:8]))} have messages that not every group has consumed"
        if reason is not None:
            raise ConfigError(f"topic {new.name!r}: {reason}; `force` does it anyway")

    def _refuse_moving(self, old: TopicConfig, new: TopicConfig) -> None:
        if new.write_queues == old.write_queues:
            return
        fifo = "FIFO" in (old.message_type, new.message_type)
        groups = self._offsets.groups_of(new.name)
        ordered = sorted(group for group in groups if fifo or any(asks(group, new.name) for asks in self.in_order))
        if ordered:
            raise ConfigError(
                f"topic {new.name!r} is consumed in order by {', '.join(ordered[:8])}, but with another number of "
                f"queues message groups move to other queues; `force` does it anyway"
            )

    def _undrained(self, name: str, queue_id: int) -> bool:
        """Return True if a queue has messages that not every group has consumed.
        A group without a committed offset in this queue of the topic has consumed none."""
        first, end = self._offsets.bounds(name, queue_id)
        if first >= end:
            return False
        committed = self._offsets.of_queue(name, queue_id)
        return not committed or any((offset or 0) < end for offset in committed.values())

    # -- the file ---------------------------------------------------------------------------------------------------

    def _enter_if_absent(self, config: TopicConfig, *, exist_ok: bool = True, grow: bool = False) -> TopicConfig:
        """Add `config` unless its topic exists. Return the topic's configuration.
        With `grow` a topic without an entry is added, too, with no fewer queues than it has."""
        name = config.name
        present = self.get(name)
        if grow and present is not None:
            count = max(present.read_queues, config.read_queues)
            config = replace(config, read_queues=count, write_queues=count)
        with self._lock:
            present = self._entered.get(name) or (None if grow else present)
            if present is None:
                self._write({**self._entered, name: config})
        if present is None:
            self._notify(name)
            return config
        if not exist_ok:
            raise ConfigError(f"topic {name!r} exists already; alter it")
        return present

    def _write(self, entered: dict[str, TopicConfig]) -> None:
        """Replace the table by `entered`, first on disk, then in memory."""
        self._file.save({"topicConfigTable": self._foreign | self._encoded(entered)}, steps=1)
        # New dicts replace the old ones, so that a look-up sees the table either before or after the change. In this
        # order, because a look-up first takes the dict that it fills, and then reads the ones set before it.
        self._entered = entered
        self._known = dict(entered)
        self._sendable = {}
        self._with_priorities = {}

    def _load(self) -> None:
        value = self._file.load() or {}
        for name, entry in object_member(value, "topicConfigTable").items():
            if entry is not None and is_path_safe(name) and "@" not in name:
                self._entered[name] = TopicConfig.from_json(name, entry)
            else:
                self._foreign[name] = entry
                self._file.report(
                    f"{self._file.path}: {name[:300]!r} cannot be a topic; its entry is kept, but ignored"
                )
        self._known = dict(self._entered)


def _check_wish(new: TopicConfig, old: TopicConfig | None = None) -> None:
    """Raise ConfigError if `new` has an invalid value that `old` does not have."""
    for name in ("read_queues", "write_queues"):
        value = getattr(new, name)
        if type(value) is not int or (not 1 <= value <= QUEUES_MAX and value != getattr(old, name, None)):
            raise ConfigError(f"topic {new.name!r}: {name} must be 1..{QUEUES_MAX}, got {value!r}")
    if type(new.order) is not bool:
        raise ConfigError(f"topic {new.name!r}: order must be True or False, not {new.order!r}")
    if type(new.perm) is not int or (not 0 <= new.perm <= _PERM_MAX and new.perm != getattr(old, "perm", None)):
        raise ConfigError(f"topic {new.name!r}: perm must be 4 (read) + 2 (write) + 1 (inherit), got {new.perm!r}")


def _attributes(old: Mapping[str, str], message_type: str | None) -> Mapping[str, str]:
    if message_type is None:
        return old
    if message_type not in MESSAGE_TYPES:
        raise ConfigError(f"message_type must be one of {', '.join(MESSAGE_TYPES)}, not {message_type!r}")
    return MappingProxyType({**old, _TYPE: message_type})


def check_topics(value: dict[str, Any]) -> None:
    """Raise ValueError if an entry is not an object with members of the right types."""
    data_version(value)
    for name, entry in entries(value, "topicConfigTable"):
        TopicConfig.from_json(name, entry)
