"""Which module of the exported model a weight belongs to, by the nodes of an ONNX graph.

PyTorch's exporter by tracing names a node after its module: ``/model/layers.0/mlp/up_proj/MatMul``.
The one by torch.export writes the modules around a node into its metadata, from the model to the
operator: ``['', 'model', 'model.layers.0', ..., 'model.layers.0.mlp.up_proj', 'linear']``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["GraphWeights", "module_weights"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST_SCOPES = 10_000
"""Characters of a node's scopes."""

_MOST_STEPS = 8
"""Nodes between an initialiser and its use."""


class GraphWeights(NamedTuple):
    """What a graph says of its initialisers.

    Attributes:
        uses: factors by the initialiser's name: whether it is ``[inputs, outputs]``.
        by_module: initialisers by the parameter that they are, with the same.
        aliases: initialisers by the name of an ``Identity`` that stands for them.
    """

    uses: dict[str, bool]
    by_module: dict[str, tuple[str, bool | None]]
    aliases: dict[str, str]


def module_weights(graph: Any, ranks: Mapping[str, int]) -> GraphWeights:
    """Look through the nodes of ``graph``, those of branches among them.

    Args:
        graph: a ``GraphProto``.
        ranks: dimensions of the initialisers by name.
    """
    nodes = list(_nodes(graph))
    makers = {
        node.output[0]: node
        for node in nodes
        if node.op_type in ("Identity", "Cast", "Transpose") and node.input and node.output
    }
    found = GraphWeights({}, {}, {})
    for name, node in makers.items():
        if node.op_type == "Identity":
            initialiser, swaps = _origin(name, makers)
            if initialiser in ranks and not swaps:
                found.aliases[name] = initialiser
    for node in nodes:
        place = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op_type)
        if place is None or len(node.input) <= place:
            continue
        initialiser, swaps = _origin(node.input[place], makers)
        if ranks.get(initialiser) != 2:
            continue
        inputs_first: bool | None = None
        if node.op_type != "Gather":
            inputs_first = (swaps % 2 == 0) != _transposes_b(node)
            found.uses.setdefault(initialiser, inputs_first)
        if module := _module(node):
            found.by_module.setdefault(f"{module}.weight", (initialiser, inputs_first))
    return found


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _origin(name: str, makers: Mapping[str, Any]) -> tuple[str, int]:
    """What a value is made of by copies alone, and how often it was transposed on the way."""
    swaps = 0
    for _ in range(_MOST_STEPS):
        node = makers.get(name)
        if node is None:
            break
        swaps += node.op_type == "Transpose"
        name = node.input[0]
    return name, swaps


def _transposes_b(node: Any) -> bool:
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def _module(node: Any) -> str:
    """The name of the module that a node came from; empty if it does not say."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES and len(entry.value) <= _MOST_SCOPES:
            try:
                return str(ast.literal_eval(entry.value)[-2])
            except (ValueError, SyntaxError, IndexError, TypeError, KeyError, RecursionError):
                return ""
    path, _, _ = str(node.name).strip("/").rpartition("/")
    return path.replace("/", ".")
