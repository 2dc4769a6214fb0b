"""Work of `mqstore consume` on a message: print it, or run a command for it.

printed and flushed                         done
command:    exit code 0                     done
            --reject-code                   Reject: a dead letter, for the reason in its first line on stderr
            any other, a signal, a timeout  Failed: it is redelivered as the retry policy says
            killed by `kill`                Enough: released and redelivered, no attempt counted
any other exception                         not the message's fault: nothing is settled, the run ends
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Final

from mqstore import Message, Reject, Retry
from mqstore.errors import FormatError
from mqstore_tools.render import note, print_message, safe

_STDERR_BYTES: Final = 1 << 16
"""Bytes of a command's stderr that are shown."""
_REASON_CHARS: Final = 300


class Enough(SystemExit):
    """Raised by a handler to release its message without a log line. The consumer ends."""


class Failed(Retry):
    """A failed attempt: the message is redelivered as the retry policy says."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.args = (reason,)


class Printer:
    """Handler that prints messages. A message is done when all of it has been written out."""

    def __init__(self, as_jsonl: bool, body_bytes: int) -> None:
        self._as_jsonl = as_jsonl
        self._body_bytes = body_bytes
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            fine = print_message(message, json_output=self._as_jsonl, body_bytes=self._body_bytes)
            sys.stdout.flush()
        if not fine:
            raise Failed("its body cannot be inflated")

    def kill(self) -> None:
        """Do nothing: a write that waits for a slow reader ends only with the process."""


@dataclass
class Commands:
    """Handler that runs a command for each message, in a new process group: Ctrl-C does not reach it.

    Like `Printer` it returns when the message is done, and raises Failed, Reject or Enough. Any other exception ends
    the run and is not counted against the message. `kill` ends running work at once."""

    argv: list[str]
    group: str
    timeout_s: float | None
    reject_code: int
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _killed: bool = False

    def __call__(self, message: Message) -> None:
        try:
            body = message.body
        except (FormatError, ImportError) as error:
            note(f"{message.topic}, queue {message.queue_id}, offset {message.offset}: {error}")
            raise Failed(str(error)) from error
        # A file, not a pipe: a background process that the command leaves running could hold a pipe open for ever.
        with tempfile.TemporaryFile() as errors:
            child = self._begin(message, errors)
            try:
                timed_out = self._wait(child, body)
            finally:
                with self._lock:
                    self._running.discard(child)
            said = _show_errors(errors)
        if self._killed and child.returncode == -signal.SIGKILL:
            raise Enough
        self._judge(child.returncode, timed_out, said)

    def _begin(self, message: Message, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise Enough
            child = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stderr=errors, env=_environment(message, self.group), process_group=0
            )
            self._running.add(child)
        return child

    def _wait(self, child: subprocess.Popen[bytes], body: bytes) -> bool:
        """Wait until the command has ended. Return True if it was killed for taking too long."""
        try:
            child.communicate(body, timeout=self.timeout_s)
            return False
        except subprocess.TimeoutExpired:
            _kill(child)
            child.communicate()
            return True

    def _judge(self, code: int, timed_out: bool, said: list[str]) -> None:
        if code == 0 and not timed_out:
            return
        if timed_out:
            why = f"its command took longer than {self.timeout_s:g} s"
        elif code < 0:
            why = f"its command was killed by signal {-code}"
        else:
            why = f"its command ended with exit code {code}"
        reason = said[0][:_REASON_CHARS] if said else why
        if code == self.reject_code:
            raise Reject(reason)
        raise Failed(reason)

    def kill(self) -> None:
        """Kill all running commands with their child processes, and start no more."""
        with self._lock:
            self._killed = True
            for child in self._running:
                _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or its number belongs to another user now
        os.killpg(child.pid, signal.SIGKILL)


def _show_errors(errors: IO[bytes]) -> list[str]:
    """Print a command's stderr. Return its lines that are not empty."""
    errors.seek(0)
    text = errors.read(_STDERR_BYTES + 1)
    lines = [safe(line) for line in text[:_STDERR_BYTES].decode("utf-8", "replace").splitlines()]
    for line in lines:
        note(line)
    if len(text) > _STDERR_BYTES:
        note("... and more")
    return [line for line in lines if line.strip()]


def _environment(message: Message, group: str) -> dict[bytes, bytes]:
    """Return our environment and the message's variables. A message can name no other variable."""
    facts: dict[str, object] = {
        "TOPIC": message.topic,
        "QUEUE_ID": message.queue_id,
        "OFFSET": message.offset,
        "TAG": message.tag or "",
        "KEYS": " ".join(message.keys),
        "MESSAGE_ID": message.message_id,
        "UNIQUE_KEY": message.unique_key,
        "ATTEMPT": message.attempt,
        "GROUP": group,
    }
    for name, value in message.properties.items():
        plain = "".join(char if char.isascii() and (char.isalnum() or char == "_") else "_" for char in name)
        facts[f"PROPERTY_{plain}"] = value
    found = {name: value for name, value in os.environb.items() if not name.startswith(b"MQSTORE_PROPERTY_")}
    for name, fact in facts.items():
        # A zero byte would end the variable and silently cut its value.
        text = str(fact).replace("\0", "\N{REPLACEMENT CHARACTER}")
        found[b"MQSTORE_" + name.encode()] = text.encode("utf-8", "replace")
    return found
