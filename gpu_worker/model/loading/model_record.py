"""What is known of a checkpoint from its last start, so that the next one need not find it out.

A checkpoint that the native library computes runs without transformers' model. Only its program's
description, the KV geometry and the tokens that end a text are left of it. They are kept in the
user's cache directory, under a key made of everything they depend on. Each start from a record
computes a few tokens, whose logits must equal the recorded ones to the last bit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.kernels.cpu import MatrixForm, WeightsFile
from penstock.kernels.cpu.compiler import cache_folder
from penstock.kernels.kv_layout import KVLayout

from ..program.decoder_record import DecoderRecord
from ..quantization.formats.checkpoint_formats import format_of
from ..quantization.formats.quantized_source import QuantizedSource, SafetensorsSource
from ..quantization.formats.stored_tensors import StoredTensors
from .checkpoint_folder import checkpoint_files, quantization_in, safetensors_files
from .geometry import KVGeometry, LayerGeometry

__all__ = ["CheckpointWeights", "ModelRecord", "RecordStore"]

log = logging.getLogger(__name__)

_MOST_HASHED_BYTES = 64 << 20
_MOST_RECORDS = 16
_MOST_PACKED = 4
"""Records that keep packed weights, which are as large as the model."""

_BEGUN = ".new-"
_ABANDONED_S = 3600.0
_PROOF = "proof"
_PACKED = "packed.weights"
_SOURCES = (
    "gpu_worker/model/loading",
    "gpu_worker/model/program",
    "gpu_worker/model/quantization",
    "kernels/cpu",
)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What a start found out.

    Attributes:
        model_type: of the configuration.
        decoder: the program's description.
        geometry: of the KV.
        vocab_size: width of the logits.
        max_model_len: prompt and output tokens of one sequence, at most.
        eos_token_ids: tokens that end an output.
        dtype: of weights and KV.
        plain_tokenizer: whether the tokenizers library alone encodes and decodes the same.
        proof: logits of a few fixed tokens.
        forms: of the program's matrices.
        packed: a file with the program's packed weights; None: they are packed at each start.
    """

    model_type: str
    decoder: DecoderRecord
    geometry: KVGeometry
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    plain_tokenizer: bool
    proof: Tensor
    forms: tuple[MatrixForm, ...]
    packed: WeightsFile | None = None


class CheckpointWeights:
    """The tensors of a checkpoint, mapped from its files for as long as one of them lives.

    Args:
        folder: with ``*.safetensors``.
        dtype: what tensors are converted to.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._file_of: dict[str, Any] = {}
        for path in safetensors_files(folder):
            file = safe_open(path, framework="pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def sizes(self) -> dict[str, int]:
        """The number of elements of every tensor, by name."""
        return {
            name: torch.Size(file.get_slice(name).get_shape()).numel()
            for name, file in self._file_of.items()
        }

    def shape(self, name: str) -> tuple[int, int]:
        """Of the matrix called ``name``.

        Raises:
            KeyError: there is none.
            ValueError: it is no matrix.
        """
        outputs, inputs = self._file_of[name].get_slice(name).get_shape()
        return outputs, inputs

    def read(self, name: str) -> Tensor:
        """The tensor called ``name``.

        Raises:
            KeyError: there is none.
        """
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor.to(self._dtype)

    def quantized(self) -> QuantizedSource | None:
        """Its quantised weights; None: it has none that a record can name.

        Raises:
            ModelError: they are damaged, or in a format that is not served.
        """
        path = self._folder / "config.json"
        if not self._file_of or not path.is_file():
            return None
        described = quantization_in(json.loads(path.read_text(encoding="utf-8")))
        if described is None:
            return None
        return SafetensorsSource(StoredTensors(self._folder), format_of(described))


class RecordStore:
    """The record of one checkpoint under the settings that change it.

    Args:
        checkpoint: its directory.
        parts: what else the record depends on: settings and the native library.
        cache: where records lie; None: ``penstock/models`` in the user's cache directory.
    """

    def __init__(
        self, checkpoint: Path, parts: Mapping[str, object], cache: Path | None = None
    ) -> None:
        folder = cache_folder().parent / "models" if cache is None else cache
        self._folder = folder / _key(checkpoint, parts)

    def load(self) -> ModelRecord | None:
        """The record; None if there is none that can be read."""
        path = self._folder / "record.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            with safe_open(self._folder / "tensors.safetensors", framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            os.utime(self._folder)  # the oldest go first
            return _from_json(data, tensors, self._folder / _PACKED)
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning("the start-up record in %s cannot be read: %s", self._folder, error)
            return None

    def save(
        self, record: ModelRecord, write_weights: Callable[[Path], WeightsFile] | None = None
    ) -> None:
        """Write the record in place of another; a cache that cannot be written is no error.

        Args:
            record: its ``packed`` is not looked at.
            write_weights: writes the packed weights to a file, to be kept with it; None: they are
                not kept.
        """
        folder = self._folder.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_BEGUN, dir=folder) as outer:
                new = Path(outer) / "record"
                new.mkdir()
                packed = None if write_weights is None else _written(write_weights, new / _PACKED)
                tree = _to_json(replace(record, packed=packed))
                (new / "record.json").write_text(json.dumps(tree), encoding="utf-8")
                tensors = {**record.decoder.kept, _PROOF: record.proof}
                save_file(tensors, new / "tensors.safetensors")
                self.forget()
                new.rename(self._folder)
            _drop_oldest(folder)
        except OSError as error:
            log.info("no start-up record is kept: %s", error)

    def forget(self) -> None:
        """Remove the record, if there is one."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _written(write: Callable[[Path], WeightsFile], path: Path) -> WeightsFile | None:
    """None where they cannot be written."""
    try:
        return write(path)
    except ValueError as error:
        log.warning("packed weights are not kept: %s", error)
        path.unlink(missing_ok=True)
        return None


def _to_json(record: ModelRecord) -> dict[str, Any]:
    return {
        "model_type": record.model_type,
        "decoder": record.decoder.tree,
        "layers": [asdict(layer) for layer in record.geometry.layers],
        "layout": record.geometry.layout.value,
        "vocab_size": record.vocab_size,
        "max_model_len": record.max_model_len,
        "eos_token_ids": sorted(record.eos_token_ids),
        "dtype": str(record.dtype).removeprefix("torch."),
        "plain_tokenizer": record.plain_tokenizer,
        "forms": [form.to_json() for form in record.forms],
        "packed_bytes": record.packed and record.packed.num_bytes,
    }


def _from_json(data: dict[str, Any], tensors: dict[str, Tensor], file: Path) -> ModelRecord:
    proof, num_bytes = tensors.pop(_PROOF), data["packed_bytes"] if file.is_file() else None
    forms = tuple(map(MatrixForm.of_json, data["forms"]))
    layers = tuple(LayerGeometry(**layer) for layer in data["layers"])
    return ModelRecord(
        model_type=data["model_type"],
        decoder=DecoderRecord(data["decoder"], tensors),
        geometry=KVGeometry(layers, KVLayout(data["layout"])),
        vocab_size=data["vocab_size"],
        max_model_len=data["max_model_len"],
        eos_token_ids=frozenset(data["eos_token_ids"]),
        dtype=getattr(torch, data["dtype"]),
        plain_tokenizer=data["plain_tokenizer"],
        proof=proof,
        forms=forms,
        packed=None if num_bytes is None else WeightsFile(file, forms, num_bytes),
    )


def _key(checkpoint: Path, parts: Mapping[str, object]) -> str:
    """Of all files (big ones by size and time of change), of our code and of what it runs on."""
    digest = hashlib.sha256()
    for path in checkpoint_files(checkpoint):
        facts = path.stat()
        digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
        if path.suffix != ".safetensors" and facts.st_size <= _MOST_HASHED_BYTES:
            digest.update(path.read_bytes())
    root = Path(__file__).parents[3]
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    packages = ("torch", "transformers", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    facts_text = json.dumps({**versions, **parts, "folder": str(checkpoint)}, sort_keys=True)
    digest.update(facts_text.encode())
    return digest.hexdigest()[:24]


def _drop_oldest(folder: Path) -> None:
    used = {path: path.stat().st_mtime for path in folder.iterdir()}
    begun = {path for path in used if path.name.startswith(_BEGUN)}
    for path in begun:
        if time.time() - used[path] > _ABANDONED_S:  # its writer was killed
            shutil.rmtree(path, ignore_errors=True)
    found = sorted(used.keys() - begun, key=lambda path: used[path])
    for path in found[:-_MOST_RECORDS]:
        shutil.rmtree(path, ignore_errors=True)
    packed = [path for path in found if (path / _PACKED).is_file()]
    for path in packed[:-_MOST_PACKED]:
        (path / _PACKED).unlink(missing_ok=True)
        os.utime(path, (used[path], used[path]))
