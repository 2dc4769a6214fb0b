"""`mqstore spark replay`: messages of stores into other stores again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mqstore_tools.shared import StoreCommand
from mqstore_tools.spark.common import Given, job_options, usable
from mqstore_tools.spark.copies import check_named, id_option, show_copied, show_plan, spread_options, target_option

__all__ = ["pairs_of", "replay"]


@click.command(
    cls=StoreCommand,
    short_help="Copy messages into other stores, under other topics, over other queues.",
    epilog="""\b
Examples:
  mqstore spark replay var/mq var/again --topics orders --from 2026-01-31
  mqstore spark replay var/mq var/again --topics orders --from 24h --id may-31
  mqstore spark replay var/mq var/test --topics orders --rename orders=orders-test --tag --id may-test
  mqstore spark replay 'fleet/*' lake/all --target set --where "level = 'ERROR'" --dry-run
  mqstore spark replay var/mq shard/a --dest shard/b --route queue""",
)
@job_options
@click.argument("dest", type=click.Path(file_okay=False))
@click.option("--dest", "more", multiple=True, type=click.Path(file_okay=False), help="A further target, with --route.")
@click.option(
    "--route",
    metavar="all|queue|TOPIC=TARGET,...",
    help="With several targets: all to each, each queue to one, or the target of each topic.",
)
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Another name for a topic; may be repeated.")
@spread_options
@click.option("--rate", type=float, metavar="N", help="Read at most N messages a second.")
@click.option("--keep-time", is_flag=True, help="Note in REPLAY_STORE_TIME when the original was stored.")
@click.option("--tag", is_flag=True, help="Mark each copy with the id of the replay, in REPLAY_ID.")
@click.option("--system", is_flag=True, help="Also retry and dead-letter topics, if --topics names them.")
@target_option("store", "set", "inbox")
@id_option
def replay(given: Given, dest: str, more: tuple[str, ...], route: str | None, run_id: str | None, **how: Any) -> None:
    """Copy messages of STORES into DEST, each once, in the order of its queue.

    Bodies, properties, times of birth and attempts stay; offsets and times of storing are those of DEST. Run again
    after a crash, or by mistake, it writes nothing twice. What waits in the engine's own topics is not copied.
    """
    with usable():
        from mqstore.spark.jobs.replay import replay as run
        from mqstore.spark.jobs.replay import replay_plan
    check_named(given, run_id)
    chosen = given.select()
    how["rename"] = pairs_of("--rename", how["rename"])
    how["id"] = run_id
    how["route"] = route if route is None or "=" not in route else pairs_of("--route", route.split(","))
    dests = [dest, *more]
    if given.dry_run:
        show_plan(given, replay_plan(chosen, dests, **how), "replay")
        return
    with given.running("copying") as (spark, report):
        done = run(spark, chosen, dests, progress=report, **how)
    show_copied(given, done, "replay")


def pairs_of(option: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, each. UsageError."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise click.UsageError(f"{option} {text!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
