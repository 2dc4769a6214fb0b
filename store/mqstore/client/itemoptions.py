"""Options of an item that is put into a `mqstore.Queue` (clients#queue)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypedDict, cast

from mqstore.contract import SendOptions
from mqstore.log.writing.outgoing import no_such_option
from mqstore.options import Duration


class ItemOptions(TypedDict, total=False):
    """Options of `Queue.put`. None is the same as leaving an option out.

    >>> options: ItemOptions = {"key": "order-7", "tag": "express", "properties": {"by": "web"}}
    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.TEXT)
    ...     receipt = queue.put("pack", **options)
    ...     task = queue.get()
    ...     task.message.keys, task.message.tag, task.message.properties, task.message.unique_key == receipt.id
    (('order-7',), 'express', {'by': 'web'}, True)
    """

    delay: Duration | None
    """Seconds after which the item becomes available."""
    key: str | Iterable[str] | None
    """Key by which `Queue.find` finds the item, or several: not empty, without spaces."""
    tag: str | None
    properties: Mapping[str, str] | None
    """Names and values that are not blank, for the receiver: `task.message.properties`."""


_NAMES: Final = {"key": "keys"} | {name: name for name in ("delay", "tag", "properties")}
"""Option of an item -> option of a put."""


def send_options(given: ItemOptions) -> SendOptions:
    """Return the options of a put. Raises TypeError for an unknown one, which names the closest."""
    if unknown := given.keys() - ItemOptions.__annotations__.keys():
        raise no_such_option(unknown, ItemOptions.__annotations__)
    return cast("SendOptions", {_NAMES[name]: value for name, value in given.items() if value is not None})
