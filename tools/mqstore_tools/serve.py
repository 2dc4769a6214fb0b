"""`mqstore serve`: let RocketMQ's clients send to a store and consume from it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

import mqstore
from mqstore.errors import ConfigError
from mqstore.serve import (
    Limits,
    Server,
    Users,
    bind_all,
    inherited,
    new_loop,
    parsed_address,
    refuse_other_machines,
    tls_context,
    unix_path,
)
from mqstore.serve import supervise as start_child
from mqstore_tools.render import VERSION, as_json, json_asked, note
from mqstore_tools.shared import command, directory_argument


def _address(value: Any) -> tuple[str, int]:
    """Parse HOST:PORT. An IPv6 host is in brackets."""
    try:
        return parsed_address(value)
    except ConfigError as error:
        raise click.BadParameter(f"{error}.") from None


_FILE: dict[str, Any] = {"type": click.Path(exists=True, dir_okay=False, path_type=Path), "metavar": "FILE"}


@command(
    short_help="Let RocketMQ's clients send and consume.",
    examples="""
  mqstore serve var/mq
  mqstore serve var/mq --listen 127.0.0.1:10911 --flush --supervise
  mqstore serve var/mq --listen 0.0.0.0:9876 --insecure-bind --advertise queue.example:9876""",
)
@directory_argument
@click.option(
    "--listen",
    type=_address,
    metavar="HOST:PORT",
    multiple=True,
    show_default="127.0.0.1:9876",
    help="Address at which clients connect. Port 0 is any free one; the ready line shows it. Can be repeated.",
)
@click.option(
    "--unix",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Path of the Unix socket for this user's processes, instead of DIR/serve.sock.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Address for the routes of clients, if they reach the server at another one than the socket's own.",
)
@click.option(
    "--auth", **_FILE, help="Serve only signed requests of the users in this TOML file, as docs/serve.md describes."
)
@click.option("--tls-cert", **_FILE, help="Certificate in PEM: clients may use TLS at the same addresses.")
@click.option("--tls-key", **_FILE, help="Its key. Without it the key is in the file of the certificate.")
@click.option(
    "--insecure-bind",
    is_flag=True,
    help="Without --auth: allow an address that other machines reach. Anybody there can read and write every message.",
)
@click.option("--metrics", type=_address, metavar="HOST:PORT", help="Address at which Prometheus gets /metrics.")
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=Limits().connections,
    help="Further clients wait until one leaves. Each connection is an open file of the process.",
)
@click.option("--flush", is_flag=True, help="Answer a send when the message is on disk.")
@click.option(
    "--supervise",
    is_flag=True,
    help="Keep the sockets in a parent process. It starts the server again when it is killed; clients wait meanwhile.",
)
def serve(
    directory: Path,
    listen: tuple[tuple[str, int], ...],
    unix: Path | None,
    advertise: str | None,
    auth: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure_bind: bool,
    metrics: tuple[str, int] | None,
    max_connections: int,
    flush: bool,
    supervise: bool,
) -> None:
    """Serve DIR as the name server and broker of RocketMQ's clients, 4.x and 5.x, Java or Go.

    DIR is created if it does not exist. Clients send, and consume with push, pull and lite pull consumers. Filters,
    order, delays, retries, dead letters, transactions and POP work, and so does mqadmin.

    The line "ready remoting=HOST:PORT unix=PATH" is printed once clients can connect; with --json it is an object. The
    file serve.json in DIR names the same endpoints while the server runs. A line on stderr says when a client comes or
    goes. Ctrl-C or SIGTERM: waiting calls are answered, and the store is closed. Exit code 0.
    """
    given = inherited()
    unix_given = any(each.family == socket.AF_UNIX for each in given)
    if not listen and len(given) == unix_given:
        listen = (("127.0.0.1", 9876),)
    hosts = [host for host, _ in listen] + [each.getsockname()[0] for each in given if each.family != socket.AF_UNIX]
    hosts += [] if metrics is None else [metrics[0]]
    if auth is None and not insecure_bind:
        refuse_other_machines(hosts, "add --auth FILE or --insecure-bind")
    users = None if auth is None else Users(auth)
    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key needs --tls-cert")
    tls = None if tls_cert is None else tls_context(tls_cert, tls_key or tls_cert)
    if unix is None and not unix_given and (unix := unix_path(directory)) is None:
        note(f"{directory} has a long path and XDG_RUNTIME_DIR is not set, so there is no Unix socket: add --unix PATH")
    if not directory.exists():
        for each in bind_all((*listen, *filter(None, [metrics])), None):  # a taken port leaves no store
            each.close()
    link = None
    if supervise:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the Unix socket is in it before the store is
        bound = bind_all(listen, unix)
        link = start_child(bound)
        listen, unix, given = (), None, [*bound, *given]
    addresses = [each.getsockname()[:2] for each in given if each.family != socket.AF_UNIX] + [*listen]
    config = mqstore.StoreConfig(store_host=_store_host(advertise, addresses))
    with mqstore.open(directory, durability="flush" if flush else "append", config=config) as store:
        server = Server(
            store.broker,
            listen=listen,
            unix=unix,
            sockets=given,
            metrics=metrics,
            users=users,
            tls=tls,
            advertise=advertise,
            limits=Limits(connections=max_connections),
        )
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(server, link))


def _store_host(advertise: str | None, addresses: list[tuple[str, int]]) -> str:
    """Return the server's address for the ids of messages. Tools look there for the message of an id."""
    with suppress(OSError, ValueError, IndexError):
        host, _, port = advertise.rpartition(":") if advertise else (addresses[0][0], "", addresses[0][1])
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        address, number = map(str, min(name for _, _, _, _, name in found)[:2])
        return f"[{address}]:{number}" if ":" in address else f"{address}:{number}"
    return mqstore.StoreConfig().store_host  # a name that is known only elsewhere


def _ready_line(endpoints: list[str]) -> str:
    paths = [each for each in endpoints if each.startswith("unix:")]
    addresses = ",".join(each for each in endpoints if each not in paths)
    return " ".join(("ready", f"remoting={addresses}", *(path.replace(":", "=", 1) for path in paths)))


async def _run(server: Server, link: socket.socket | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.ended.set)
    async with server:
        if json_asked():
            click.echo(as_json(VERSION | {"ready": True, "endpoints": server.endpoints}))
        else:
            click.echo(_ready_line(server.endpoints))
        logger = logging.getLogger("mqstore")
        logger.setLevel(logging.INFO)  # clients that come and go
        for handler in logger.handlers:
            handler.setLevel(logging.INFO)
        if link is not None:
            link.send(b"r")
            loop.add_reader(link, server.ended.set)  # its end: the parent is gone
        await server.ended.wait()
        note("stopping: waiting calls are answered, then the store is closed")
