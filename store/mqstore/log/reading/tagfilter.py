"""Tag expressions: `A || B`, or `*` for everything (format#tags-code, format#tag-filter).

A unit has only the tag's hash, and hashes collide. So units only exclude messages, and then the record decides.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from mqstore import arrays as np
from mqstore.errors import FilterError
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC
from mqstore.layout.consumequeue import LAST_ADDRESS
from mqstore.layout.javahash import java_hash
from mqstore.native import kernel

if TYPE_CHECKING:
    from mqstore.log.message import Message


JAVA_BLANKS = "".join(map(chr, range(0x21)))
"""Characters that Java's `String.trim` removes. A no-break space is not removed."""


class UnitFilter(Protocol):
    """Filter of a read. It filters units first, many at once, and then messages."""

    @property
    def hashes(self) -> array[int] | None:
        """Hashes of the tags that may pass, or None if all may. The same rule as `prefilter`, for compiled code."""

    def prefilter(self, tags_codes: np.NDArray[np.int64]) -> np.NDArray[np.bool_]:
        """Return a mask of the units whose messages may pass."""

    def apply(self, messages: list[Message]) -> list[Message]:
        """Return the `messages` that pass."""


class TagFilter:
    """Filter for messages whose tag is one of `tags`."""

    __slots__ = ("hashes", "tags")

    def __init__(self, tags: frozenset[str]) -> None:
        self.tags = tags
        self.hashes = array("i", sorted(java_hash(tag) for tag in tags))

    def prefilter(self, tags_codes: np.NDArray[np.int64]) -> np.NDArray[np.bool_]:
        """Return a mask of the units that may pass, by the low 32 bits of the tags code. Addresses may pass."""
        mask: np.NDArray[np.bool_] = np.isin(tags_codes.astype(np.int32), self.hashes)
        addresses = tags_codes <= LAST_ADDRESS
        return mask | addresses if addresses.any() else mask

    def apply(self, messages: list[Message]) -> list[Message]:
        tags = self.tags
        if kernel is not None:
            return kernel.tagged(messages, tags)  # type: ignore[no-any-return]
        return [message for message in messages if message.tag in tags]


def refuse_other_types(tags: object) -> None:
    """Raise FilterError unless `tags` is a str: a list, for example, is refused."""
    if not isinstance(tags, str):
        raise FilterError(f"tags must be a str such as 'paid || refunded', not {tags!r:.80}", 0)


def refuse_single_bar(expression: str) -> None:
    """Raise FilterError for "paid|refunded", which would match nothing as the name of a tag."""
    at = expression.replace("||", "  ").find("|")
    if at >= 0:
        raise FilterError(f"tags {expression!r}: separate tags with `||`. A tag cannot contain a single bar", at)


def parse_tags(expression: str | None, topic: str) -> TagFilter | None:
    """Return the filter of `expression`, or None if it passes everything.

    >>> parse_tags("paid || refunded", "orders").tags == {"paid", "refunded"}
    True
    """
    if expression is None:
        return None
    refuse_other_types(expression)
    tags = frozenset(piece.strip() for piece in expression.split("||")) - {""}
    refuse_single_bar(expression)
    if not tags and expression.strip():
        raise FilterError(f"tags {expression!r}: no tag between the bars", expression.find("|"))
    if not tags or "*" in tags:
        if len(tags) > 1:
            raise FilterError(f"tags {expression!r}: '*' means every tag and cannot be joined with others", 0)
        return None
    if topic == SCHEDULE_TOPIC:
        raise FilterError(f"tags {expression!r}: cannot filter {SCHEDULE_TOPIC} by tag. Read it with '*'", 0)
    return TagFilter(tags)
