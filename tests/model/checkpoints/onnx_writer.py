"""Writes a checkpoint's weights as an ONNX graph, as PyTorch's exporters name and turn them.

``tracing``: factors of ``MatMul`` are transposed and lose their names, nodes are named after
modules, and equal tensors are stored once. ``dynamo``: the same with the modules in the nodes'
metadata, and a tied embedding has the head's name. ``named``: every parameter keeps its name. Only
nodes that say something of a weight are written: penstock reads the graph and does not run it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

__all__ = ["NAMES", "write_onnx"]

_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
NAMES = ("tracing", "dynamo", "named")


def write_onnx(
    source: Path,
    target: Path,
    names: str = "named",
    *,
    dtype: torch.dtype = torch.float32,
    external: str = "",
    prefix: str = "",
    change: Callable[[Any], None] = lambda model: None,
) -> Path:
    """Make ``target`` of the checkpoint ``source``, with ``model.onnx`` in place of its weights.

    Args:
        source: an unquantised checkpoint.
        target: its folder; made.
        names: one of :data:`NAMES`.
        dtype: of the weights.
        external: name of the file beside it that holds them; empty: none.
        prefix: of all names, as a wrapper's.
        change: applied to the ``ModelProto`` before it is written.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    writer = _Writer(names, target / external if external else None, prefix)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
            writer.weight(f"{name}.weight", module)
    for name, parameter in model.named_parameters():
        writer.keep(name, parameter.detach())
    graph = helper.make_graph(writer.nodes, "decoder", [], [], list(writer.tensors.values()))
    proto = helper.make_model(graph)
    change(proto)
    onnx.save(proto, target / "model.onnx")
    return target


class _Writer:
    def __init__(self, names: str, external: Path | None, prefix: str) -> None:
        self.nodes: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self._names, self._external, self._prefix = names, external, prefix
        self._stored: dict[int, str] = {}
        self._norms: dict[bytes, str] = {}
        self._done: set[str] = set()

    def weight(self, name: str, module: Any) -> None:
        """The weight of a linear layer or an embedding, with the node that uses it."""
        weight, count = module.weight.detach(), len(self.nodes)
        self._done.add(name)
        if isinstance(module, nn.Embedding):
            stored = name
            if self._names == "dynamo" and name == "transformer.wte.weight":
                stored = "lm_head.weight"
            stored = self._store(stored, weight)
            self._stored[module.weight.data_ptr()] = stored
            self._node("Gather", name, [stored, "input_ids"])
        elif not isinstance(module, nn.Linear):  # Conv1D is [inputs, outputs]
            self._node("Gemm", name, ["x", self._store(name, weight)])
        elif (tied := self._stored.get(module.weight.data_ptr())) and self._names == "dynamo":
            self._node("Transpose", "", [tied], output="turned")
            self._node("MatMul", name, ["x", "turned"])
        elif self._names == "named":
            self._node("Gemm", name, ["x", self._store(name, weight)], transB=1)
        else:
            anonymous = f"onnx::MatMul_{count}" if self._names == "tracing" else f"val_{count}"
            turned = weight.T.contiguous()
            self._node("MatMul", name, ["x", self._store(anonymous, turned, plain=True)])

    def keep(self, name: str, tensor: Tensor) -> None:
        """A parameter under its own name, if it is not there yet in any form."""
        if name in self._done:
            return
        values = bytes(tensor.contiguous().view(torch.uint8).numpy())
        if self._names == "tracing" and values in self._norms:
            self._node("Identity", "", [self._norms[values]], output=self._prefix + name)
        else:
            self._norms[values] = self._store(name, tensor)

    def _node(self, kind: str, name: str, inputs: list[str], output: str = "", **more: Any) -> None:
        module = (self._prefix + name).removesuffix(".weight")
        node = helper.make_node(kind, inputs, [output or f"{name}!"], **more)
        if self._names == "dynamo":
            node.name = f"node_{len(self.nodes)}"
            parts = module.split(".")
            scopes = ["", *(".".join(parts[: n + 1]) for n in range(len(parts))), kind.lower()]
            entry = node.metadata_props.add()
            entry.key, entry.value = "pkg.torch.onnx.name_scopes", repr(scopes)
        elif name:
            path = re.sub(r"\.(?!\d)", "/", module)
            node.name = f"/{path}/{kind}"
        self.nodes.append(node)

    def _store(self, name: str, tensor: Tensor, *, plain: bool = False) -> str:
        name = name if plain else self._prefix + name
        proto = TensorProto(name=name, data_type=_TYPES[tensor.dtype], dims=tensor.shape)
        data = bytes(tensor.contiguous().view(torch.uint8).numpy())
        if self._external is not None:
            proto.data_location = TensorProto.EXTERNAL
            with self._external.open("ab") as file:
                begin = file.tell()
                file.write(data)
            facts = {"location": self._external.name, "offset": begin, "length": len(data)}
            for key, value in facts.items():
                entry = proto.external_data.add()
                entry.key, entry.value = key, str(value)
        elif tensor.dim() == 1 and tensor.dtype == torch.float32:
            proto.float_data.extend(tensor.tolist())
        elif tensor.dim() == 1:
            proto.int32_data.extend(tensor.view(torch.uint16).tolist())
        else:
            proto.raw_data = data
        self.tensors[name] = proto
        return name
