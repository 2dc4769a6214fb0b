"""`mqstore trace`: follow one key through all stores."""

from __future__ import annotations

from typing import Any

import click

from mqstore_tools.multi_store import on_spark, spark_option, stores_argument
from mqstore_tools.render import pick, progress, show_tables, when
from mqstore_tools.shared import FINDINGS, StoreCommand, json_option


@click.command(
    cls=StoreCommand,
    short_help="Follow one key through all stores.",
    epilog="""\b
Examples:
  mqstore trace fleet/* order-4711
  mqstore trace var/mq 7F0000010B7A63947C6B0F4A1D2E0001 --json     # a unique key""",
)
@stores_argument
@click.argument("key")
@spark_option
@json_option
def trace(stores: tuple[str, ...], key: str, master: str | None, json_output: bool) -> None:
    """Find all copies of the messages with this KEY, or with this unique key, in the stores in DIR.

    Copies in topics, delays, retries and dead letters are listed in the order in which they were stored. `mqstore get
    DIR --message-id ID` prints the unique key of a message whose id you have. Exit code 1 if nothing is found.
    """
    from mqstore.jobs import trace as follow

    with on_spark(master) as spark, progress("looking", of_bytes=False) as report:
        found = follow(stores, key, spark=spark, progress=report).to_dict()
    cells = [
        [
            when(hop["store_ms"]),
            *pick(hop, "store kind topic queue_id queue_offset"),
            hop["attempts"] + (hop["kind"] != "dead letter"),  # no attempt follows
            _details(hop),
        ]
        for hop in found["hops"]
    ]
    columns = ("stored", "store", "what", "topic", "queue>", "offset>", "attempt>", "details")
    empty = f"no message has the key {found['key']}"
    show_tables(found, ("", columns, cells), json_output=json_output, empty=empty)
    if not found["hops"]:
        click.get_current_context().exit(FINDINGS)


def _details(hop: dict[str, Any]) -> str:
    facts = []
    if hop["origin_topic"] is not None and hop["origin_topic"] != hop["topic"]:
        facts.append(f"of {hop['origin_topic']}")
    if hop["deliver_ms"] is not None:
        facts.append(f"due {when(hop['deliver_ms'])}")
    if hop["reason"] is not None:
        facts.append(f"because {hop['reason']}")
    if hop["consumed_by"]:
        facts.append(f"consumed by {', '.join(hop['consumed_by'])}")
    if hop["waiting_for"]:
        facts.append(f"waits for {', '.join(hop['waiting_for'])}")
    return "; ".join(facts)
