"""Own codes of the server, 31000 to 31199: the methods of the engine contract as calls (remoting-server, section 12).

    request     code | body {parameter: value}, those that are not defaults
    answer      0 | body [result]
    error       its code | body class, text, attributes; raised as the same class on the other side

Parameters and results have the types of the contract's methods, so a method that is added there needs one line here.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, Unpack, get_args, get_origin, get_type_hints

from mqstore import contract, errors
from mqstore.broker.admin.operations import Operations
from mqstore.broker.redelivery.dead_letters import Replay
from mqstore.contract import BrokerContract, Event, GroupConfig, Limits, NobodyAsked
from mqstore.errors import ConfigError, FormatError, MQStoreError, NotPermittedError, ResultCode
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.reading.reader import GetResult, StoreReader
from mqstore.log.recovery.report import Finding
from mqstore.log.snapshot.copy import SnapshotReport
from mqstore.log.writing.outgoing import key_words, no_such_option, user_properties
from mqstore.options import Durability
from mqstore.remoting.values import Codec, codec_of, dumps, loads

PROTOCOL: Final = 1
"""Number of these codes and shapes. A server refuses another one."""
NEWS: Final = 31099
"""Request of the server: (event, topic or group) has happened."""
CHECK: Final = 31098
"""Request of the server: was this half message committed?"""


class Welcome(NamedTuple):
    """Answer to the first request of a connection."""

    protocol: int
    name: str
    """Place of the messages, for texts: the path of the store."""
    store_id: str
    """Text that no other store has. Empty for a directory that RocketMQ made."""
    limits: Limits
    durability: Durability
    now_ms: int
    """Time of the server."""


class SessionCalls(Protocol):
    """A connection, for the server."""

    def hello(self, protocol: int, client: str, version: str = "") -> Welcome:
        """Begin. `client` is a text that no other process has: older connections of it are ended."""

    def clients(self) -> list[dict[str, Any]]:
        """Return the clients of the server, as `mqstore clients --json` prints them."""

    def ping(self) -> None:
        """Show that the server answers."""

    def listen(self, event: Event) -> None:
        """Have the news of an event sent."""

    def withdraw(self, number: int, turn: tuple[str, str, int] | None = None) -> None:
        """End a parked call without an answer. If it is answered already, `turn` (group, topic, queue) is passed on."""

    def puts(self, topic: str, bodies: list[bytes], queue_id: int | None, durability: Durability | None = None) -> None:
        """Put the messages of many calls in flight. It has only a short form (`remoting/short.py`)."""

    def check(self, producer_group: str | None, on: bool) -> None:
        """Answer the checks of a producer group from now on, or no longer."""

    def checked(self, transaction_id: str, answer: bool | NobodyAsked | None) -> None:
        """Answer CHECK."""


class LogCalls(Protocol):
    """Reads of the log that differ from those of `StoreReader`. All others are as there."""

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        tags: str | None = "*",
    ) -> GetResult: ...

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def offset_at(self, topic: str, queue_id: int, when: datetime) -> int: ...

    def verify(self) -> list[Finding]: ...

    def snapshot(self, target: str, *, link: bool = False) -> SnapshotReport: ...


class LetterCalls(Protocol):
    """Dead letters of a group (`DeadLetters`)."""

    def bounds(self, group: str) -> tuple[int, int]: ...

    def count(self, group: str) -> int: ...

    def select(
        self, group: str, *, offsets: Iterable[int], start_ms: int | None = None, stop_ms: int | None = None
    ) -> list[Message]: ...

    def replay(
        self,
        group: str,
        offsets: Iterable[int] | None = None,
        *,
        all_groups: bool = False,
        to_topic: str | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        dry_run: bool = False,
    ) -> Replay: ...

    def purge(
        self, group: str, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> int: ...


TABLES: Final[Mapping[str, type]] = {
    "": BrokerContract,
    "topics": contract.TopicCalls,
    "groups": contract.GroupCalls,
    "members": contract.MemberCalls,
    "locks": contract.LockCalls,
    "transactions": contract.TransactionCalls,
    "items": contract.ItemCalls,
    "session": SessionCalls,
    "letters": LetterCalls,
    "log": LogCalls,
    "admin": Operations,
}
"""Objects whose methods are calls, by the first part of a call's name."""

# code, name; repeat: it may be done again after a lost connection; thread: it always waits for the disk.
_TABLE: Final = """
31000 session.hello             repeat
31001 session.ping              repeat
31002 session.listen            repeat
31003 session.withdraw          repeat
31004 session.checked           repeat
31005 session.check             repeat
31006 session.clients           repeat
31007 session.puts
31010 put_many
31011 put
31012 sync                      repeat thread
31013 message_at                repeat
31014 find                      repeat
31015 recall                    repeat
31016 read                      repeat
31017 min_offset                repeat
31018 max_offset                repeat
31019 offset_for_time           repeat
31020 add_waiter                repeat
31021 committed                 repeat
31022 save_offsets              repeat thread
31030 start_of                  repeat
31031 commit                    repeat
31033 lag                       repeat
31034 attempts                  repeat
31035 note_attempt              repeat
31036 suspended                 repeat
31037 release_all               repeat thread
31038 pop_retry_topics          repeat
31039 send_back                        thread
31040 locks.renew_batch         repeat
31041 locks.begin_work          repeat
31042 locks.end_work            repeat
31043 locks.owner               repeat
31044 locks.snapshot            repeat
31045 members.register          repeat
31046 members.unregister        repeat
31047 locks.try_lock            repeat
31048 locks.try_lock_batch      repeat
31049 locks.unlock_batch        repeat
31050 pop                       repeat
31051 ack                       repeat
31053 renew                     repeat
31054 nack                      repeat
31055 release                   repeat
31056 dead_letter
31057 pending                   repeat
31058 add_pop_waiter            repeat
31059 wake_one                  repeat
31060 take_losses
31062 members.check             repeat
31063 members.check_retry       repeat
31064 members.set_retry         repeat thread
31065 members.get               repeat
31066 members.members           repeat
31067 members.mode              repeat
31070 letters.select            repeat thread
31071 letters.replay                   thread
31072 letters.purge             repeat thread
31073 letters.bounds            repeat
31074 letters.count             repeat
31075 transactions.prepare             thread
31076 transactions.end          repeat thread
31078 transactions.half_message repeat
31079 transactions.get          repeat
31080 log.stats                 repeat thread
31081 topics.get                repeat
31082 topics.entered            repeat
31083 topics.require            repeat
31084 topics.for_send           repeat thread
31085 topics.names              repeat
31086 topics.create             repeat thread
31087 groups.get                repeat
31088 groups.require            repeat thread
31089 groups.create             repeat thread
31090 log.snapshot                     thread
31091 log.verify                repeat thread
31092 log.get                   repeat
31093 log.find                  repeat thread
31094 log.get_by_id             repeat
31095 log.offsets               repeat
31096 log.offset_at             repeat
31097 log.queues                repeat
31068 log.topics                repeat
31069 log.offsets_or_none       repeat
31100 admin.topics              repeat thread
31101 admin.groups              repeat thread
31102 admin.lag                 repeat thread
31103 admin.delays              repeat thread
31104 admin.pending             repeat thread
31105 admin.create_topic               thread
31106 admin.alter_topic         repeat thread
31107 admin.delete_topic               thread
31108 admin.set_group                  thread
31110 admin.delete_group               thread
31111 admin.reset                      thread
31112 admin.cancel              repeat thread
31113 admin.purge                      thread
31114 admin.replay                     thread
31115 admin.activity            repeat thread
31121 items.page                repeat thread
31122 items.counts              repeat thread
31123 items.purge                      thread
31130 topics.expire             repeat thread
31131 items.put                        thread
31132 items.cancel                     thread
31133 items.by_key              repeat thread
31140 topics.for_priority       repeat thread
"""


class Call:
    """One call: its code, and the codecs of its parameters and result."""

    def __init__(self, code: int, name: str, *, repeat: bool = False, thread: bool = False) -> None:
        self.code = code
        self.name = name
        self.repeat = repeat
        """True if doing it again is harmless."""
        self.thread = thread
        """True if it waits for the disk whatever its arguments are."""
        self.table, _, self.method = name.rpartition(".")
        declared: Any = vars(TABLES[self.table]).get(self.method)
        self._function = declared or getattr(StoreReader, self.method, _save_offsets)

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        return {name: each for name, each in inspect.signature(self._function).parameters.items() if name != "self"}

    @cached_property
    def _codecs(self) -> dict[str, Codec]:
        hints = get_type_hints(self._function)
        types: dict[str, Any] = {}
        for name, each in self._parameters.items():
            if each.kind is each.VAR_KEYWORD:
                types |= self._options(hints[name])
            elif get_origin(hints[name]) is not get_origin(Callable[[], None]) and name != "callback":
                types[name] = hints[name]
        return {name: codec_of(hint) for name, hint in types.items()}

    def _options(self, hint: Any) -> dict[str, Any]:
        if get_origin(hint) is Unpack:
            return get_type_hints(get_args(hint)[0])
        if self.name == "groups.create":
            hints = get_type_hints(GroupConfig)
            return {each.name: hints[each.name] for each in fields(GroupConfig)[1:]}
        return {}

    @cached_property
    def _result(self) -> Codec:
        hint = get_type_hints(self._function)["return"]
        return codec_of(bool if self.method.endswith("_waiter") else hint)

    @cached_property
    def _in_order(self) -> list[str]:
        return [name for name, each in self._parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {name: each.default for name, each in self._parameters.items() if each.default is not each.empty}

    @cached_property
    def has_durability(self) -> bool:
        """True if it waits for the disk with durability "flush"."""
        return "durability" in self._codecs

    # -- the client's side ------------------------------------------------------------------------------------------

    def given(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name. Raises TypeError as Python does."""
        if len(args) > len(self._in_order):
            raise TypeError(f"{self.method}() takes {len(self._in_order)} arguments, not {len(args)}")
        given = dict(zip(self._in_order, args, strict=False))
        if twice := given.keys() & options.keys():
            raise TypeError(f"{self.method}() got several values for {', '.join(twice)}")
        return given | options

    def request(self, given: dict[str, Any]) -> bytes:
        """Return the body of a request. Raises TypeError for arguments that the method does not have."""
        codecs, defaults, blobs = self._codecs, self._defaults, list[bytes]()
        if "tag" in codecs:  # a put: refuse its options here, in the words of a store in this process
            given = {**given, "keys": None if given.get("keys") is None else key_words(given["keys"])}
            user_properties(given.get("tag"), given["keys"], given.get("properties"))
        try:
            values = {
                name: codecs[name].write(value, blobs)
                for name, value in given.items()
                if name not in defaults or defaults[name] is not value
            }
        except KeyError:
            if unknown := given.keys() - codecs.keys():
                raise no_such_option(unknown, codecs) from None
            raise
        self._check_complete(values, TypeError)
        return dumps(values, blobs)

    def result(self, body: bytes) -> Any:
        """Return the result in an answer. Raises FormatError."""
        value, blobs = loads(body)
        if type(value) is not list or len(value) != 1:
            raise FormatError(f"the answer to {self.name} is not a list of one", "body", 0)
        return self._result.read(value[0], blobs)

    # -- the server's side ------------------------------------------------------------------------------------------

    def arguments(self, body: bytes) -> dict[str, Any]:
        """Return the arguments of a request by name. Raises FormatError, and ConfigError for other names."""
        values, blobs = loads(body)
        if type(values) is not dict:
            raise FormatError(f"the arguments of {self.name} are not an object", "body", 0)
        if unknown := values.keys() - self._codecs.keys():
            raise ConfigError(f"{self.name} has no argument {min(unknown)!r}; this server may be older than its client")
        self._check_complete(values, ConfigError)
        given = {}
        for name, value in values.items():
            try:
                given[name] = self._codecs[name].read(value, blobs)
            except FormatError as error:
                what = str(error).rpartition(" (field ")[0]  # the place in the request tells a user nothing
                raise ConfigError(f"{self.method}: {name} is wrong: {what}") from None
        return given

    def answer(self, result: Any) -> bytes:
        blobs: list[bytes] = []
        value = [self._result.write(result, blobs)]
        return dumps(value, blobs)

    def _check_complete(self, values: Mapping[str, Any], kind: type[Exception]) -> None:
        for name in self._in_order:
            if name not in values and name not in self._defaults and name in self._codecs:
                raise kind(f"{self.method}() has no argument {name!r}")


def _save_offsets() -> None:
    """The contract has it as an attribute."""


def _calls() -> dict[str, Call]:
    rows = (line.split() for line in _TABLE.strip().splitlines())
    return {
        name: Call(int(code), name, repeat="repeat" in flags, thread="thread" in flags) for code, name, *flags in rows
    }


CALLS: Final[Mapping[str, Call]] = _calls()
"""All calls by name."""
BY_CODE: Final[Mapping[int, Call]] = {call.code: call for call in CALLS.values()}

# -- errors ---------------------------------------------------------------------------------------------------------

_BUILTIN: Final = ("LookupError", "KeyError", "IndexError", "TypeError", "ValueError", "OverflowError")
"""Other errors that calls raise."""
_RECEIPTS: Final = {"receipt": codec_of(SendReceipt | None), "receipts": codec_of(list[SendReceipt | str])}
_OF_SYSTEM: Final = ("errno", "strerror", "filename")
_PLAIN: Final = (str, int, float, bool, type(None))


def _named(name: str) -> type[Exception] | None:
    found = getattr(errors, name, None) if name not in _BUILTIN else getattr(builtins, name)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def is_known(error: Exception) -> bool:
    """Return True for an error that the caller may have caused. Others are faults of the server."""
    return any(_named(kind.__name__) is kind for kind in type(error).__mro__ if kind is not Exception)


def code_of(error: Exception) -> int:
    """Return the code of an answer with this error. It is not 0."""
    return int(getattr(error, "code", ResultCode.SYSTEM_ERROR)) or int(ResultCode.SYSTEM_ERROR)


def error_body(error: Exception) -> bytes:
    """Return the body of an answer with this error."""
    kind = next((each for each in type(error).__mro__ if _named(each.__name__) is each), MQStoreError)
    state = {**vars(error), **{name: value for name in _OF_SYSTEM if (value := getattr(error, name, None)) is not None}}
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, _PLAIN):
            values[name] = value
        elif name in _RECEIPTS and _RECEIPTS[name].fits(value):
            values[name] = _RECEIPTS[name].write(list(value) if name == "receipts" else value, [])
    args = [each for each in error.args if isinstance(each, _PLAIN)]
    return dumps([kind.__name__, args if len(args) == len(error.args) else [str(error)], values])


def error_of(code: int, remark: str | None, body: bytes) -> Exception:
    """Return the error of an answer."""
    try:
        value, blobs = loads(body)
        name, args, state = value
        kind = _named(name) or MQStoreError
        error = kind.__new__(kind)
        error.args = tuple(args)
        for each, of in state.items():
            if each in _OF_SYSTEM and not issubclass(kind, OSError):
                continue
            setattr(error, each, _RECEIPTS[each].read(of, blobs) if each in _RECEIPTS else of)
    except (ValueError, TypeError, AttributeError, MQStoreError):
        # The refusal of a server with users has no body: it does not look at the request.
        kind = NotPermittedError if code == ResultCode.NO_PERMISSION else MQStoreError
        return kind(f"the server answers {code}: {remark}")
    return error
