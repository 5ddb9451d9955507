"""Bodies of files, in a directory or at any fsspec URL: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import posixpath
import uuid
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any, Self

from penstock.shared.errors import ConfigurationError

__all__ = ["Storage", "Writer"]

_COPY_BYTES = 1 << 20


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

    def writer(self, name: str) -> Writer:
        """A new file of this name, which appears when the writer is closed without an error."""
        path = self._path(name)
        self._files.makedirs(posixpath.dirname(path), exist_ok=True)
        return Writer(self._files, path, local=self._local)

    def write(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write a whole file, in place of one of this name; returns its size in bytes."""
        with self.writer(name) as writer:
            for chunk in chunks:
                writer.write(chunk)
        return writer.size

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading.

        Raises:
            FileNotFoundError: no such file.
        """
        opened: IO[bytes] = self._files.open(self._path(name), "rb")
        return opened

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: no such file.
        """
        with self.open(name) as file:
            return file.read()

    def chunks(self, names: Iterable[str]) -> Iterator[bytes]:
        """The bytes of several files, one behind the other."""
        for name in names:
            with self.open(name) as file:
                while chunk := file.read(_COPY_BYTES):
                    yield chunk

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all its files; nothing happens if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)


class Writer:
    """Writes one file; used as a context manager. On an error nothing remains.

    On a local disk the bytes go to a temporary name, are synced, and are renamed. An object store
    does the same by itself: an object appears when its upload is complete.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, files: Any, path: str, *, local: bool) -> None:
        self._files, self._path, self._local = files, path, local
        self._temporary = f"{path}.{uuid.uuid4().hex[:12]}.part" if local else path
        self._file: IO[bytes] = files.open(self._temporary, "wb")
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        """Make the file appear under its name, safe from a power failure."""
        if self._local:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if self._local:
            os.replace(self._temporary, self._path)
            _sync_directory(posixpath.dirname(self._path))

    def discard(self) -> None:
        """Drop what was written."""
        if not self._local and hasattr(self._file, "discard"):
            self._file.discard()
            return
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._temporary)

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


def _sync_directory(path: str) -> None:
    """Make a rename survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
