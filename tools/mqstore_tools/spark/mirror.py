"""`mqstore spark mirror`: what comes into stores, copied into another as it comes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from mqstore_tools.render import console, note, print_json, show_bytes, table
from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable
from mqstore_tools.spark.copies import show_topics, spread_options, target_option
from mqstore_tools.spark.replay import pairs_of

__all__ = ["mirror"]

_PLANNED = ("max_messages", "max_bytes", "rename", "queues", "spread", "system", "target")
"""Options that say what is read, and what may be refused; the others are of the run alone."""


@contextmanager
def _until_asked(continuous: bool) -> Iterator[threading.Event]:
    """Set by the first Ctrl-C: the batch that is at work is finished, and told of. The second one interrupts."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asked.set()

    if not continuous:
        yield asked
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@click.command(
    cls=StoreCommand,
    short_help="Copy what comes into stores into another, as it comes.",
    epilog="""\b
Examples:
  mqstore spark mirror var/mq backup/mq --checkpoint backup/mq.checkpoint
  mqstore spark mirror var/mq backup/mq --checkpoint cp --continuous --max-messages 100000
  mqstore spark mirror 'fleet/*' lake/all --target set --checkpoint cp --option startingTimestamp=2026-01-01""",
)
@job_options
@click.argument("dest", type=click.Path(file_okay=False))
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where it is kept how far the mirror is; a folder of its own, outside of stores.",
)
@click.option(
    "--continuous",
    is_flag=True,
    help="Go on until Ctrl-C, and finish the batch then; without it, end when there is no more.",
)
@click.option("--interval", "interval_s", type=float, default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--max-messages", type=click.IntRange(1), metavar="N", help="Of a batch.")
@click.option("--max-bytes", type=click.IntRange(1), metavar="N", help="Of a batch.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Another name for a topic; may be repeated.")
@spread_options
@click.option("--keep-time", is_flag=True, help="Note in REPLAY_STORE_TIME when the original was stored.")
@click.option("--tag", is_flag=True, help="Mark each copy with the id of the mirror, in REPLAY_ID.")
@click.option("--system", is_flag=True, help="Also retry and dead-letter topics, if --topics names them.")
@target_option("store", "set", "inbox")
def mirror(given: Given, dest: str, checkpoint: str, continuous: bool, **how: Any) -> None:
    """Copy what is in STORES into DEST, each message once, and when run again what came since.

    A new mirror begins at the oldest message, or where --option startingOffsets, startingTimestamp or startingGroup
    say: --from and --to are refused, as a mirror has no bounds. Once there is a checkpoint, it says where to go on.
    """
    with usable():
        from mqstore.spark.jobs.mirror import mirror as run
        from mqstore.spark.jobs.mirror import mirror_plan
    chosen = given.select()
    how["rename"] = pairs_of("--rename", how["rename"])
    if given.dry_run:
        given.print_plan(mirror_plan(chosen, dest, checkpoint, **{name: how[name] for name in _PLANNED}))
        return
    if continuous:
        how["trigger"] = "continuous"
    with given.running("copying") as (spark, report), _until_asked(continuous) as asked:
        done = run(
            spark, chosen, dest, checkpoint, stop=asked.is_set, wait=asked.wait, progress=report, **how
        ).to_dict()
    if given.json_output:
        print_json(done)
    elif not done["batches"]:
        note(f"nothing new for {dest}")
    else:
        facts = [
            ("target", done["dest"]),
            ("batches", done["batches"]),
            ("messages", f"{done['messages']}, {show_bytes(done['bytes'])}"),
        ]
        if done["damaged"]:
            facts.append(("damaged, left out", done["damaged"]))
        console().print(table(f"mirror {done['id']}", ("", ""), facts))
        show_topics("", done["topics"])
