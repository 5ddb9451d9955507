"""The fingerprint of a checkpoint: workers of one name must serve the same model.

It covers whatever decides the tokens: configuration, weights, tokenizer, chat template, generation
defaults, and the number format. Small files are hashed whole. Of a larger weights file the hash
covers the size, the header with all names, shapes and offsets, and 4 KiB from each tensor's middle.
That is some 300 reads for a model of 7 billion parameters; reading all would take as long as
loading. Training, merging and quantising change whole tensors, so they are seen. A change of single
weights elsewhere in a tensor is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

from .checkpoint_folder import checkpoint_files, weight_files

__all__ = ["fingerprint_of"]

_SUFFIXES = (".bin", ".gguf", ".jinja", ".json", ".model", ".onnx", ".safetensors", ".txt")
"""Files that transformers reads: configuration, tokenizer, templates, weights."""

_WHOLE_BYTES = 64 << 20
"""Files up to this size are hashed whole: less than a tenth of a second."""

_SAMPLE_BYTES = 4096

_MOST_HEADER_BYTES = 100 << 20
"""What safetensors itself allows."""


def fingerprint_of(folder: Path, dtype: str, quantization: str = "auto") -> str:
    """The fingerprint of the checkpoint in ``folder``, computed in ``dtype``.

    Args:
        folder: the checkpoint.
        dtype: of activations, and of weights that are not quantised.
        quantization: what else is done to its weights; ``auto``: nothing.

    Returns:
        16 hexadecimal digits of a SHA-256.

    Raises:
        OSError: a file cannot be read.
    """
    whole = hashlib.sha256(dtype.encode())
    if quantization != "auto":
        whole.update(f"\n{quantization}".encode())
    templates = folder.glob("additional_chat_templates/*")
    modules = folder.glob("[0-9]*_*/*")  # of sentence-transformers
    weights = set(weight_files(folder))  # external data of ONNX may have any name
    for file in sorted({*checkpoint_files(folder), *templates, *modules, *weights}):
        if (file.suffix in _SUFFIXES or file in weights) and file.is_file():
            name = file.name if file == folder else file.relative_to(folder).as_posix()
            whole.update(f"\n{name} {_digest(file)}".encode())
    return whole.hexdigest()[:16]


def _digest(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as source:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(source, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        header = _header(source.read(8), source.fileno(), size)
        digest.update(header)
        for middle in _middles(header, size):
            digest.update(os.pread(source.fileno(), _SAMPLE_BYTES, middle))
    return digest.hexdigest()


def _header(length: bytes, file: int, size: int) -> bytes:
    """The JSON header of a safetensors file; empty for another file."""
    (count,) = struct.unpack("<Q", length)
    if count > min(_MOST_HEADER_BYTES, size):
        return b""
    return os.pread(file, count, 8)


def _middles(header: bytes, size: int) -> list[int]:
    """Where samples are read: in the middle of each tensor, or evenly if there is no header."""
    try:
        tensors = json.loads(header)
        ranges = [
            tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"
        ]
        return [8 + len(header) + max(begin, (begin + end - _SAMPLE_BYTES) // 2)
                for begin, end in sorted(ranges)]  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return [size * part // 1024 for part in range(1024)]
