"""`mqstore consume`: print the messages of topics for a group, or run a command for each.

This module has the options, the summary and the dry run. `consume_run` runs it, `actions` prints and runs commands.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from mqstore import RetryPolicy, Store
from mqstore.admin import check_group, check_user_topic, default_retry
from mqstore.errors import StoreClosedError
from mqstore_tools.actions import Commands, Printer
from mqstore_tools.consume_run import Run, quiet, supervise
from mqstore_tools.render import VERSION, as_json, body_bytes_option, json_asked, note, progress, show_tables
from mqstore_tools.session import Position, administer, dry_run_option, open_store, position, target_argument
from mqstore_tools.shared import NumberRange, command, finish, refuse_given

_OF_COMMANDS: Final = ("shell", "exec_timeout", "reject_code")
_OF_PRINTING: Final = ("format_", "body_bytes")

_EX_DATAERR: Final = 65
_LONGEST_S: Final = 366 * 86_400
"""Longest delay in seconds, the same as the largest `max_delay`."""
_LONGEST_WAIT_S: Final = 1_000_000
"""Longest wait for a command in seconds. The operating system counts milliseconds in 31 bits."""


@command(
    short_help="Consume messages for a group: print them, or run a command for each.",
    epilog="""\b
Examples:
  mqstore consume var/mq orders --group billing
  mqstore consume var/mq orders refunds --group audit --from latest --format jsonl | jq .topic
  mqstore consume var/mq orders --group billing --exec './book.sh' --workers 4 --max-attempts 5
  mqstore consume var/mq mail --group mailer --exec 'sendmail -t' --exec-timeout 60
  mqstore consume var/mq orders --group nightly --idle-exit 0    # exit when the queue is drained
  mqstore consume 127.0.0.1:9876 orders --group billing --dry-run

A command gets the body on stdin, and in its environment MQSTORE_TOPIC, MQSTORE_QUEUE_ID, MQSTORE_OFFSET,
MQSTORE_TAG, MQSTORE_KEYS, MQSTORE_MESSAGE_ID, MQSTORE_UNIQUE_KEY, MQSTORE_ATTEMPT (1, 2, ...),
MQSTORE_GROUP and MQSTORE_PROPERTY_<NAME> (with _ for each character of a name but letters, digits and _).

\b
  exit code 0   the message is done
  65            it becomes a dead letter at once; the reason is the first line
                of stderr (--reject-code)
  any other     it failed and is redelivered by the group's retry policy, or
                dead-lettered after the last attempt

Ctrl-C or SIGTERM: start no more commands, wait for running ones, and save the committed offsets. Twice: kill them;
their messages are redelivered. Three times: end at once.

Exit codes: 0 fine, 1 messages failed (and did not succeed later) or became dead letters, 2 wrong usage, 3 the store
cannot be opened.""",
)
@target_argument
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--group", required=True, help="Consumer group. Resumes at its committed offset.")
@click.option(
    "--ordered",
    is_flag=True,
    default=None,
    help="In order: a failed message blocks its queue until it succeeds. Default: the group's setting.",
)
@click.option("--tags", metavar="EXPR", default="*", help="Only messages with these tags, as in 'created || paid'.")
@click.option("--sql", metavar="EXPR", help='Only messages whose properties match this filter, as in "price > 5".')
@click.option(
    "--from",
    "start",
    type=position,
    metavar="WHERE",
    help="Start of the group in queues without a committed offset: earliest, latest, a time (UTC by default) or an age "
    "(36h). Default: the group's setting, earliest for a new group.",
)
@click.option("--workers", type=click.IntRange(1, 1000), default=1, help="Messages at a time.")
@click.option("--max-messages", type=click.IntRange(1), metavar="N", help="Stop after N messages.")
@click.option(
    "--idle-exit",
    type=NumberRange(0),
    metavar="SECONDS",
    help="Exit when no message came for this time. 0: exit when the queue is drained.",
)
@click.option(
    "--max-attempts", type=click.IntRange(1), help="Attempts before a dead letter. Saved as the group's setting."
)
@click.option(
    "--retry-delay",
    type=NumberRange(0, _LONGEST_S),
    metavar="SECONDS",
    multiple=True,
    help="Delay before a failed message is redelivered. Repeat it for the 2nd, 3rd, ... attempt. Saved for the group.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "jsonl"]),
    default="text",
    help="jsonl: one JSON object per line, like `export`.",
)
@body_bytes_option
@click.option("--exec", "command", metavar="CMD", help="Run CMD for each message instead of printing it.")
@click.option("--shell", is_flag=True, help="Run CMD in /bin/sh. Without it, CMD is split into words.")
@click.option(
    "--exec-timeout",
    type=NumberRange(0.001, _LONGEST_WAIT_S),
    metavar="SECONDS",
    help="Kill a command that takes longer.",
)
@click.option(
    "--reject-code",
    type=click.IntRange(1, 255),
    default=_EX_DATAERR,
    help="Exit code with which a command makes its message a dead letter.",
)
@dry_run_option
def consume(
    target: Path,
    topics: tuple[str, ...],
    group: str,
    ordered: bool | None,
    tags: str,
    sql: str | None,
    start: Position | None,
    workers: int,
    max_messages: int | None,
    idle_exit: float | None,
    max_attempts: int | None,
    retry_delay: tuple[float, ...],
    format_: str,
    body_bytes: int,
    command: str | None,
    shell: bool,
    exec_timeout: float | None,
    reject_code: int,
    dry_run: bool,
) -> None:
    """Consume the messages of TOPICs in the store in DIR for a group: print them, or run a command for each.

    A message is done when it has been printed, or its command has ended with exit code 0. If the process dies, messages
    that are not done are redelivered. Holds the writer's lock while it runs, or consumes from the server that has the
    store open, next to other members of the group. --json prints a summary at the end, on
    stdout with --exec, or else on stderr.
    """
    if command is None:
        refuse_given(_OF_COMMANDS, "goes with --exec")
    else:
        refuse_given(_OF_PRINTING, "does not go with --exec")
    if sql is not None and tags != "*":
        raise click.UsageError("give --tags or --sql, not both")
    argv = None if command is None else _argv(command, shell=shell)
    topics = tuple(dict.fromkeys(topics))
    if dry_run:
        _dry_run(target, group, topics, start)
        return
    work = Printer(format_ == "jsonl", body_bytes) if argv is None else Commands(argv, group, exec_timeout, reject_code)
    with open_store(target, create=False) as store:
        _check_names(store, topics, group, tags, sql)
        policy = _policy(store, group, ordered, max_attempts, retry_delay)
        run = Run(
            *(store, topics, group, work, max_messages),
            tags=tags,
            sql=sql,
            ordered=ordered,
            start=start,
            workers=workers,
            retry=policy,
        )
        began = time.monotonic()
        shown = argv is not None or not sys.stdout.isatty()  # else messages are printed on the same terminal
        bar = progress("consuming", partial(_progress_of, run), of_bytes=False) if shown else nullcontext()
        with quiet(), bar:
            supervise(run, idle_exit)
        summary = _summary(run, time.monotonic() - began)
    if json_asked():
        print(as_json(VERSION | summary), file=sys.stdout if argv is not None and run.error is None else sys.stderr)
    else:
        note(_text(summary))
    if run.error is not None:
        raise run.error
    finish(summary["failing"] or summary["dead_letters"])


def _argv(command: str, *, shell: bool) -> list[str]:
    """Return the words of a command. A missing program is refused now: it would fail for every message."""
    if shell:
        return ["/bin/sh", "-c", command]
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"--exec {command!r}: {error}; --shell runs it in a shell") from None
    if not argv or shutil.which(argv[0]) is None:
        what = "is not executable" if argv and Path(argv[0]).is_file() else "is not a command"
        raise click.UsageError(f"--exec {command!r}: {argv[0] if argv else ''!r} {what}")
    return argv


def _policy(
    store: Store, group: str, ordered: bool | None, max_attempts: int | None, retry_delay: tuple[float, ...]
) -> RetryPolicy | None:
    """Return the retry policy for the group, or None for its own. UsageError if it cannot be ordered."""
    known = store.broker.groups.get(group)
    if known is not None and ordered and not known.orderly:
        raise click.UsageError(f"group {group!r} is not ordered: leave out --ordered")
    if max_attempts is None and not retry_delay:
        return None
    before = default_retry(bool(ordered)) if known is None else known.retry_policy
    attempts = before.max_attempts if max_attempts is None else max_attempts
    return RetryPolicy(attempts, retry_delay) if retry_delay else before.with_attempts(attempts)


def _check_names(store: Store, topics: Iterable[str], group: str, tags: str, sql: str | None) -> None:
    """Check names and filters now. The consumer would refuse them only after it has created the group."""
    check_group(group)
    for topic in topics:
        if store.broker.topics.get(topic) is None:
            check_user_topic(topic)
    if sql is not None:
        store.broker.filter(sql, "SQL92")
    else:
        store.broker.filter(tags)


def _progress_of(run: Run) -> tuple[int, int]:
    """Return (messages taken, messages in all)."""
    try:
        return run.taken, run.taken + run.lag()
    except StoreClosedError:
        return run.taken, run.taken


def _summary(run: Run, took_s: float) -> dict[str, Any]:
    done = run.outcomes
    return {
        "group": run.group,
        "topics": list(run.topics),
        "messages": run.taken,
        "done": done["ack"],
        "failed_attempts": done["retry"],
        "failing": len(run.failing),
        "dead_letters": done["dlq"],
        "not_settled": run.taken - sum(done.values()),
        "left": run.lag(),
        "seconds": round(took_s, 3),
        "stopped_by": run.why,
    }


def _text(summary: dict[str, Any]) -> str:
    seconds = summary["seconds"]
    rate = f", {summary['messages'] / seconds:.0f}/s" if seconds else ""
    facts = [f"{summary['done']} done"]
    for name, words in (
        ("failing", "failed, to be redelivered"),
        ("dead_letters", "dead letters"),
        ("not_settled", "not settled, to be redelivered"),
    ):
        if summary[name]:
            facts.append(f"{summary[name]} {words}")
    return (
        f"{summary['group']}: {summary['messages']} messages in {seconds:.1f} s{rate}: {', '.join(facts)}; "
        f"{summary['left']} left (stopped by {summary['stopped_by']})"
    )


def _dry_run(target: Path, group: str, topics: Iterable[str], start: Position | None) -> None:
    """Print the messages that the group has not consumed. Changes nothing."""
    with administer(target) as desk:
        rows, missing = desk.pending(group, [*topics], start)
    total = sum(row["messages"] for row in rows)
    found = {"dry_run": True, "group": group, "messages": total, "queues": rows, "missing": missing}
    columns = ("topic", "queue>", "next offset>", "end>", "messages>", "in flight>")
    cells = (f"would consume {total} messages for group {group}", columns, [row.values() for row in rows])
    notes = [f"topic {topic} does not exist; the command would wait for it" for topic in missing]
    show_tables(found, cells, notes=notes)
