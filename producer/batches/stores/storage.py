"""Bodies of files, in a directory or at any fsspec URL: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import posixpath
import time
import uuid
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any, Self

from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.quoting import one_line

__all__ = ["Storage", "StorageError", "Writer"]

_COPY_BYTES = 1 << 20
_UNFINISHED = "unfinished"
"""Folder of a local storage where files are written before they get their names."""


class StorageError(PenstockError):
    """The storage does not do what it must: it is full, closed to us, gone, or out of reach."""


class Storage:
    """Files by name below one root. All methods block: call them in a thread.

    Args:
        url: a directory, or an fsspec URL such as ``s3://bucket/prefix``.

    Raises:
        ConfigurationError: the URL's file system is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"batches.storage: {url!r} cannot be used: {error}") from None
        self._local = "file" in _protocols(self._files)
        self._seen = False

    def writer(self, name: str) -> Writer:
        """A new file of this name, which appears when the writer is closed without an error.

        Raises:
            StorageError: it cannot be written; so do all methods of the writer.
        """
        if not self._local:
            return Writer(self._files, self._path(name), None)
        there = os.path.isdir(self._root)
        if self._seen and not there:  # its disk was taken away: another one would get our files
            raise StorageError(f"{self._root} is gone; bring back what batches.storage names")
        temporary = self._path(f"{_UNFINISHED}/{uuid.uuid4().hex}.part")
        writer = Writer(self._files, self._path(name), temporary)
        self._seen = True
        return writer

    def write(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write a whole file, in place of one of this name; returns its size in bytes.

        Raises:
            StorageError: it cannot be written.
        """
        with self.writer(name) as writer:
            for chunk in chunks:
                writer.write(chunk)
        return writer.size

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading, which raises the errors of its own kind.

        Raises:
            FileNotFoundError: no such file.
            StorageError: it cannot be opened.
        """
        with _named("read", self._path(name)):
            opened: IO[bytes] = self._files.open(self._path(name), "rb")
        return opened

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: no such file.
            StorageError: it cannot be read.
        """
        return b"".join(self.chunks([name]))

    def chunks(self, names: Iterable[str]) -> Iterator[bytes]:
        """The bytes of several files, one behind the other; raises as :meth:`read`."""
        for name in names:
            with self.open(name) as file:
                while True:
                    with _named("read", self._path(name)):
                        chunk = file.read(_COPY_BYTES)
                    if not chunk:
                        break
                    yield chunk

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all its files; nothing happens if there is none.

        Raises:
            StorageError: it cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError), _named("removed", self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def delete_unfinished(self, older_than_s: float) -> int:
        """Remove what killed processes have begun to write; returns how many files that were.

        Only a local storage has such files; object stores drop an upload that is not completed by
        a rule of the bucket.

        Args:
            older_than_s: a file goes if its last write is longer ago, in seconds.

        Raises:
            StorageError: one cannot be removed.
        """
        folder, gone = self._path(_UNFINISHED), 0
        if not self._local or not os.path.isdir(folder):
            return 0
        with _named("removed", folder), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    if time.time() - entry.stat().st_mtime > older_than_s:
                        os.unlink(entry.path)
                        gone += 1
        return gone

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


class Writer:
    """Writes one file; used as a context manager. On an error nothing remains.

    On a local disk the bytes go to a temporary name, are synced, and are renamed. An object store
    does the same by itself: an object appears when its upload is complete.

    Args:
        files: the file system.
        path: what is written.
        temporary: where it is written first; None for an object store.

    Attributes:
        size: bytes written so far.

    Raises:
        StorageError: it cannot be written.
    """

    def __init__(self, files: Any, path: str, temporary: str | None) -> None:
        self._files, self._path, self._temporary = files, path, temporary
        self.size = 0
        with self._written():
            files.makedirs(posixpath.dirname(path), exist_ok=True)
            if temporary is not None:
                files.makedirs(posixpath.dirname(temporary), exist_ok=True)
            self._file: IO[bytes] = files.open(temporary or path, "wb")

    def write(self, data: bytes) -> None:
        """Append bytes."""
        with self._written():
            self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        """Make the file appear under its name, safe from a power failure."""
        try:
            with self._written():
                if self._temporary is None:
                    self._file.close()
                    return
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._path)
                _sync_directory(posixpath.dirname(self._path))
        except StorageError:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop what was written. What cannot be dropped is left to be swept."""
        with contextlib.suppress(Exception):  # it could not be written: so it may not be closed
            if self._temporary is None and hasattr(self._file, "discard"):
                self._file.discard()
                return
            self._file.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            with _named("written", self._path):
                yield
        except FileNotFoundError:
            message = f"{self._path} cannot be written: its directory is gone"
            raise StorageError(f"{message}; check batches.storage") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


@contextlib.contextmanager
def _named(done: str, path: str) -> Iterator[None]:
    """Give errors of any file system one class; a missing file stays what it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # each file system has errors of its own
        why = one_line(str(getattr(error, "strerror", None) or error or type(error).__name__), 200)
        raise StorageError(
            f"{path} cannot be {done}: {why}; check the space and rights of batches.storage"
        ) from error


def _sync_directory(path: str) -> None:
    """Make a rename survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
