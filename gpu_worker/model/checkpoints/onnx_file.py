"""The weights in an ONNX file, by the names of the parameters they were exported from.

Specification: ``onnx.proto`` and ``docs/ExternalData.md`` of ONNX. A weight is an initialiser of
the graph, in the file or in another one beside it. Exporters of PyTorch keep a parameter's name,
unless they transposed it for a product: such a weight is found by the module that its ``MatMul`` or
``Gemm`` came from (see :mod:`.onnx_graph`). The graph itself is not run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.shared.errors import ModelError, UnsupportedModel

from .named_weights import NamedWeight
from .onnx_graph import module_weights

__all__ = ["onnx_weights"]

_MOST_BYTES = (2 << 30) - 1
"""Of a protobuf message; a larger model has its weights in a file beside it."""

_FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Served types by their number in ``TensorProto.DataType``."""

_QUANTISED = {
    "DequantizeLinear", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MatMulBnb4",
    "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QLinearMatMul",
}  # fmt: skip


def onnx_weights(path: Path) -> dict[str, NamedWeight]:
    """The weights in ``path`` by the names of parameters; none of them is read yet.

    Raises:
        ModelError: the file is damaged, or the package onnx is missing.
        UnsupportedModel: its weights are quantised.
    """
    try:
        import onnx
    except ImportError as error:
        raise ModelError(
            f"{path} needs the package onnx: pip install 'penstock-llm[onnx]'"
        ) from error
    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(
            f"{path} has over 2 GiB, more than a protobuf can; export it with external data"
        )
    try:
        graph: Any = onnx.load(path, format="protobuf", load_external_data=False).graph
    except Exception as error:  # protobuf's own types, by its implementation
        raise ModelError(f"{path} is damaged ({error}); copy it again") from error
    coded = sorted({node.op_type for node in graph.node} & _QUANTISED)
    if coded:
        raise UnsupportedModel(
            f"{path} has quantised weights ({', '.join(coded)}); served from ONNX: weights in "
            "full; export it in full and set model.quantization"
        )
    stored = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, NamedWeight] = {}
    uses, by_module, aliases = module_weights(graph, {n: len(t.dims) for n, t in stored.items()})
    for name, tensor in stored.items():
        found[name] = _named(path, tensor, uses.get(name))
    for name, (initialiser, is_turned) in by_module.items():
        found.setdefault(name, _named(path, stored[initialiser], is_turned))
    for name, initialiser in aliases.items():
        found.setdefault(name, found[initialiser])
    return found


def _named(path: Path, tensor: Any, inputs_first: bool | None) -> NamedWeight:
    shape = tuple(int(size) for size in tensor.dims)
    return NamedWeight(shape, functools.partial(_read, path, tensor), inputs_first, tensor.name)


def _read(path: Path, tensor: Any) -> Tensor:
    """The values of an initialiser."""
    dtype, shape = _FLOATS.get(tensor.data_type), tuple(int(size) for size in tensor.dims)
    if dtype is None:
        raise UnsupportedModel(
            f"{path}: tensor {tensor.name!r} has ONNX's data type {tensor.data_type}; served: "
            "float32, float16, bfloat16 and float64; export it in one of these"
        )
    if any(size < 0 for size in shape):
        raise _fault(path, tensor, f"its shape is {list(shape)}")
    needed = math.prod(shape) * dtype.itemsize
    if tensor.data_location == tensor.EXTERNAL:
        data = _external(path, tensor, needed)
    else:
        data = _embedded(tensor, dtype)
    if data.nbytes != needed:
        raise _fault(
            path, tensor, f"its shape {list(shape)} needs {needed} bytes, it has {data.nbytes}"
        )
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _embedded(tensor: Any, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Bytes of a tensor in the file itself."""
    if tensor.raw_data:
        return np.frombuffer(bytearray(tensor.raw_data), dtype=np.uint8)
    if dtype == torch.float32:
        values = np.array(tensor.float_data, dtype=np.float32)
    elif dtype == torch.float64:
        values = np.array(tensor.double_data, dtype=np.float64)
    else:  # 16 bits in an int32 each
        values = np.array(tensor.int32_data, dtype=np.int32).astype(np.uint16)
    return values.view(np.uint8)


def _external(path: Path, tensor: Any, needed: int) -> np.ndarray[Any, Any]:
    """Bytes of a tensor in another file, mapped copy-on-write."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    file = _inside(path, tensor, said)
    try:
        offset, length = int(said.get("offset", 0)), int(said.get("length", needed))
    except ValueError as error:
        raise _fault(path, tensor, f"its offset or length is no number ({error})") from error
    size = file.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise _fault(
            path, tensor, f"it is {length} bytes from {offset} of {file}, which has {size}"
        )
    if length == 0:
        return np.empty(0, dtype=np.uint8)
    data = np.memmap(file, dtype=np.uint8, mode="c", offset=offset, shape=(length,))
    return np.array(data) if offset % 8 else data  # numbers have to lie at multiples of their size


def _inside(path: Path, tensor: Any, said: Mapping[str, str]) -> Path:
    """The file that a tensor lies in, which must be in the folder of ``path``."""
    location, folder = said.get("location", ""), path.parent.resolve()
    try:
        file = (folder / location).resolve()
        found = file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte, too long, links in a circle
        raise _fault(path, tensor, f"its file {location!r} cannot be opened ({error})") from error
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts or folder not in file.parents:
        raise _fault(
            path,
            tensor,
            f"its file {location!r} is not in the model's folder; put the file itself there, no "
            "link to it",
        )
    if not found:
        raise _fault(path, tensor, f"its file {location!r} is missing")
    return file


def _fault(path: Path, tensor: Any, why: str) -> ModelError:
    return ModelError(f"{path}: tensor {tensor.name!r} is unusable: {why}; copy or export it again")
