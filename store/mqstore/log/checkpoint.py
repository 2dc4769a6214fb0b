"""Checkpoint file: one page that says how far the store was durable (format#checkpoint)."""

from __future__ import annotations

import os
from pathlib import Path

from mqstore.files.filesystem import FileSystem
from mqstore.layout.checkpoint import ENCODED_BYTES, FILE_BYTES, Checkpoint, decode, encode, is_plausible

__all__ = ["CheckpointFile"]


class CheckpointFile:
    """The file `checkpoint`. Its 128 bytes are written by one `pwrite`, within one sector, and synced."""

    def __init__(self, root: Path, fs: FileSystem, file_mode: int) -> None:
        self.path = root / "checkpoint"
        self._fs = fs
        self._file_mode = file_mode
        self.current = Checkpoint()

    def load(self) -> bool:
        """Read the file. Return False if it is missing or cannot be a checkpoint. Then it counts as empty."""
        try:
            with self._fs.opened(self.path, os.O_RDONLY) as fd:
                data = self._fs.pread(fd, ENCODED_BYTES, 0)
                # A writer may be writing it, so repeat the read until two agree.
                while data != (again := self._fs.pread(fd, ENCODED_BYTES, 0)):
                    data = again
        except FileNotFoundError:
            return False
        plausible = is_plausible(data)
        self.current = decode(data) if plausible else Checkpoint()
        return plausible

    def save(self, checkpoint: Checkpoint) -> None:
        """Write and sync `checkpoint`, unless the file holds it already."""
        if checkpoint == self.current and self.path.exists():
            return
        fs = self._fs
        created = not self.path.exists()
        with fs.opened(self.path, os.O_RDWR | os.O_CREAT, self._file_mode) as fd:
            data = encode(checkpoint)
            if created or fs.size(fd) < FILE_BYTES:
                data = data.ljust(FILE_BYTES, b"\0")  # a Java broker maps the whole page
            fs.pwrite(fd, data, 0)
            fs.fdatasync(fd)
        if created:
            fs.sync_directory(self.path.parent)
        self.current = checkpoint
