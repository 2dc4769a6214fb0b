"""`mqstore spark shell`: start Python with a Spark session, and stores as views."""

from __future__ import annotations

import code

import click

from mqstore_tools.multi_store import Messages, message_options, session, session_options, spark_errors, usable
from mqstore_tools.render import note
from mqstore_tools.shared import StoreCommand

__all__ = ["shell"]


@click.command(
    cls=StoreCommand,
    short_help="Start Python with a Spark session, and stores as views.",
    epilog="""\b
Examples:
  mqstore spark shell var/mq
  echo 'print(messages.count())' | mqstore spark shell var/mq""",
)
@message_options
@session_options
@click.option("--json", is_flag=True, expose_value=False, help="Print an error as JSON, for programs.")
def shell(messages: Messages, master: str, conf: tuple[str, ...]) -> None:
    """Start Python with a session `spark` and a data frame for each view of the stores in DIR.
    The views are `messages`, `queues`, `segments`, `groups`, `delay`, `traffic` and `verify`, also in `spark.sql`.
    Options filter `messages`."""
    with usable():
        from mqstore.spark import create_views
    chosen = messages.select()
    with session(master, conf) as spark:
        with spark_errors():
            views = create_views(spark, chosen)
        note(f"spark {spark.version}; views: {', '.join(views)}")
        names = {"spark": spark, **{view: spark.table(view) for view in views}}
        code.interact(banner="", local=names, exitmsg="")
