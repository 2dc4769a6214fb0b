"""RocketMQ's own clients, Java and Go, against `mqstore serve` (`make conformance`; remoting-server, section 15.1)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.support import started

CLIENTS = [Path(path).absolute() for path in os.environ.get("MQSTORE_ROCKETMQ_CLIENTS", "").split(":") if path]
"""Folders with the jars of one version each."""
SCENARIOS = [
    "send", "push", "filters", "delay", "retry", "order", "poison", "broadcast", "litepull", "transactions", "members",
    "pull", "namespace", "trace",
]  # fmt: skip
PROGRAMS = {
    "3": (["Clients3"], ["send", "push", "retry", "order", "delay", "pull"]),
    "4": (["Clients"], [*SCENARIOS, "requests"]),
    "5": (["Clients", "Clients5"], [*SCENARIOS, "timer", "pop", "codecs", "reset"]),
}
"""Classes, the main one first, and scenarios, by the major version of the client."""
ONLY = os.environ.get("SCENARIOS", "").split()
"""Scenarios to run, for a change of one. Default: all."""


GO_CLIENT = os.environ.get("MQSTORE_GO_CLIENT", "")
"""The compiled program of the folder `go`."""
GO_SCENARIOS = ["send", "push", "filters", "order", "delay", "retry", "pull", "transactions"]
HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "clients.md").read_text()


def lines_of_the_docs(language: str, address: str) -> str:
    """Return the example of a language, with another address."""
    [code] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    return str(code).replace("127.0.0.1:9876", address)


def printed(*command: object) -> str:
    """Return the first line that a program prints which does not end."""
    with subprocess.Popen([str(word) for word in command], stdout=-1, text=True) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        program.kill()
    return line


def test_matrix_of_the_docs_is_the_table_of_tests() -> None:
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \|(.*)\|$", PAGE, re.M)
    shown = [{name for name, cells in rows if cells.split("|")[column].strip() == "yes"} for column in range(4)]
    assert shown == [set(PROGRAMS[major][1]) for major in "345"] + [set(GO_SCENARIOS)]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not CLIENTS, reason="needs a JDK and Maven: make conformance")
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("jars", CLIENTS, ids=lambda path: path.name)
def test_java_clients(tmp_path: Path, jars: Path, binary: bool) -> None:
    major = jars.name.rpartition("-")[2][0]
    if binary and major == "3":
        pytest.skip("clients 3.x know only the JSON header")
    classes, scenarios = PROGRAMS[major]
    sources = [HERE / "java" / f"{name}.java" for name in classes]
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", tmp_path, *sources], check=True)
    header = ["-Drocketmq.serialize.type=ROCKETMQ", "-Dcom.rocketmq.heartbeat.v2=true"] if binary else []
    home = f"-Duser.home={tmp_path}"  # logs, and the offsets of broadcasting
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        done = subprocess.run(
            ["java", home, *header, "-cp", f"{tmp_path}:{jars}/*", classes[0], f"{host}:{port}", *ONLY],
            capture_output=True,
            text=True,
            check=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert lines == [f"ok {name}" for name in scenarios if not ONLY or name in ONLY], done.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(not CLIENTS, reason="needs a JDK and Maven: make conformance")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("jars", [path for path in CLIENTS if "-client-5" in path.name], ids=lambda path: path.name)
def test_java_clients_with_access_keys(tmp_path: Path, jars: Path, tls: bool) -> None:
    source = Path(__file__).parent / "java" / "Secured.java"
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", tmp_path, source], check=True)
    users = tmp_path / "users.toml"
    users.touch(0o600)
    users.write_text(
        "[shop]\nsecret = 'secret of shop'\npub = ['orders']\n"
        "[books]\nsecret = 'secret of books'\nsub = ['orders']\ngroups = ['billing']\n"
    )
    options = ["--listen", "127.0.0.1:0", "--auth", users, "--tls-cert", Path(__file__).parent / "localhost.pem"]
    with started(tmp_path / "mq", *options) as (_, (host, port)):
        command = ["java", f"-Duser.home={tmp_path}", f"-Dtls.enable={str(tls).lower()}", "-cp", f"{tmp_path}:{jars}/*"]
        done = subprocess.run(
            [*command, "Secured", f"{host}:{port}"], capture_output=True, text=True, check=True, timeout=200
        )
    assert done.stdout.splitlines()[-3:] == ["consumed true", "other topic false", "wrong secret false"], done.stderr


@pytest.mark.skipif(not CLIENTS, reason="needs a JDK and Maven: make conformance")
@pytest.mark.parametrize("jars", [path for path in CLIENTS if "-3." not in path.name], ids=lambda path: path.name)
def test_java_lines_of_the_docs(tmp_path: Path, jars: Path) -> None:
    packages = ["client.consumer", "client.consumer.listener", "client.producer", "common.consumer", "common.message"]
    imports = "".join(f"import org.apache.rocketmq.{package}.*;" for package in packages)
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        lines = lines_of_the_docs("java", f"{host}:{port}")
        source = tmp_path / "Doc.java"
        source.write_text(
            f"{imports} class Doc {{ public static void main(String[] args) throws Exception {{ {lines} }} }}"
        )
        shown = printed("java", f"-Duser.home={tmp_path}", "-cp", f"{jars}/*", source)
    assert shown == "paid o-17\n"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not GO_CLIENT, reason="needs Go: make conformance")
def test_go_client(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        command = [Path(GO_CLIENT).absolute(), f"{host}:{port}", *ONLY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert lines == [f"ok {name}" for name in GO_SCENARIOS if not ONLY or name in ONLY], done.stdout + done.stderr


@pytest.mark.skipif(not GO_CLIENT, reason="needs Go: make conformance")
def test_go_lines_of_the_docs(tmp_path: Path) -> None:
    for name in ("go.mod", "go.sum"):
        shutil.copy(HERE / "go" / name, tmp_path)
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        (tmp_path / "main.go").write_text(lines_of_the_docs("go", f"{host}:{port}"))
        subprocess.run(["go", "build", "-mod=mod", "-o", "doc", "."], cwd=tmp_path, check=True)
        shown = printed(tmp_path / "doc")
    assert shown == "paid o-17\n"
