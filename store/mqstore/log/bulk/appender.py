"""Bulk appends to an open store: staged shards, and the bundles of its inbox (spark#commit)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mqstore.errors import ConfigError, InvalidMessageError, MQStoreError, NotPermittedError
from mqstore.files.flusher import GroupCommit
from mqstore.log.bulk.inbox import CreateTopics, Inbox
from mqstore.log.bulk.splice import Splicer, SpliceResult
from mqstore.log.bulk.txn import TxnFile
from mqstore.log.parts import StoreParts
from mqstore.log.taskerrors import TaskErrors

__all__ = ["BulkAppender"]

_log = logging.getLogger("mqstore")


class BulkAppender:
    """Appends staged shards and bundles, one at a time."""

    def __init__(
        self, parts: StoreParts, splicer: Splicer, commit: GroupCommit, *, appended: Callable[[], None]
    ) -> None:
        """`appended` is called when new records are in the log."""
        self.splicer = splicer
        self.txn: TxnFile = splicer.txn
        self.lock = splicer.lock
        """Held during a bulk append. Closing the store waits for it."""
        self.inbox = Inbox(
            parts.root, parts.fs, parts.clock, splice=self._take_bundle, file_mode=parts.config.file_mode
        )
        self._root = parts.root
        self._commit = commit
        self._appended = appended

    def show(self, result: SpliceResult) -> SpliceResult:
        """Make the records of a bulk append visible to all readers. Return `result`."""
        if not result.already:
            try:
                self._commit.sync_now()
            except (OSError, MQStoreError) as error:  # later puts will fail, but this bulk append has succeeded
                _log.error("%s: %s; what was spliced before is in", self._root, error)
            self._appended()
        return result

    def _take_bundle(self, shards: list[Path], app: str, version: int, create: Mapping[str, int]) -> int:
        """Append a bundle of the inbox. Return the last version of `app` that is in the log by now."""
        self.show(self.splicer.splice(shards, app=app, version=version, create=create))
        return self.txn.state.version_of(app)  # also while the store is being closed

    def take_inbox_if_idle(self, is_closed: Callable[[], bool]) -> None:
        """Append the bundles that wait in the inbox, unless a bulk append runs or the store is closed."""
        if self.splicer.is_busy:
            return  # the flusher must not wait
        with self.lock:
            if not is_closed():
                self.inbox.run_once()

    def enter_topics_by(self, create_topics: CreateTopics, errors: TaskErrors) -> None:
        """Create the topics of bundles with `create_topics` from now on.
        Topics of bundles that were appended without a broker are created at once."""
        with self.lock:
            self.inbox.create_topics = create_topics
            if self.txn.state.create:
                errors.attempt("topics of bundles", self._enter_noted)

    def _enter_noted(self) -> None:
        """Create the noted topics one by one, so that a topic that fails does not keep the others out.
        The messages of a topic that fails stay."""
        assert self.inbox.create_topics is not None
        for topic, queues in self.txn.state.create.items():
            try:
                self.inbox.create_topics({topic: queues})
            except (InvalidMessageError, ConfigError, NotPermittedError) as error:
                _log.error("%s: topic %r, which a bundle asked for, is not entered: %s", self._root, topic, error)
        self.txn.save(replace(self.txn.state, create={}))
