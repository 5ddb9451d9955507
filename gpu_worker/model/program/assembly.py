"""Makes a native program of a decoder's description."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import LOGITS, Activation, Library, NativeProgram, NormWeights, Type

from ..quantization.coding import Linear, matrix_parts
from .description import MLP, Decoder, Layer

__all__ = ["assemble"]


def assemble(decoder: Decoder, library: Library, dtype: torch.dtype) -> NativeProgram:
    """The program of ``decoder``; its weights are packed copies, but for the embedding.

    Args:
        decoder: what to compute.
        library: what computes it.
        dtype: of weights and KV, float32 or bfloat16.
    """
    program = NativeProgram(library, dtype)
    tokens, outputs = _Buffers(program, outputs=False), _Buffers(program, outputs=True)
    hidden = decoder.embedding.shape[1]
    stream = tokens.floats("stream", hidden)
    program.embed(decoder.embedding, stream, scale=decoder.embedding_factor)
    for index, layer in enumerate(decoder.layers):
        rows, matrices = tokens, _matrices(program, layer)
        _attend(program, rows, layer, matrices, index, hidden)
        if index == len(decoder.layers) - 1:
            # Behind the last attention no row needs another: only those with logits go on.
            rows = outputs
            _go_on(program, tokens, outputs, layer, matrices, hidden)
        _add_attention(program, rows, layer, matrices, hidden)
        _add_mlp(program, rows, layer, matrices, hidden)
    head = program.matrix(*matrix_parts([decoder.head], dtype))
    program.linear(
        head,
        _normed(program, outputs, decoder.norm, head, hidden),
        LOGITS,
        bias=decoder.head.bias,
        scale=decoder.logit_factor,
        softcap=decoder.logit_softcap,
    )
    program.pack()
    return program


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Of one layer."""

    projections: int
    output: int
    inner: int
    down: int


def _matrices(program: NativeProgram, layer: Layer) -> _Matrices:
    def matrix(*layers: Linear) -> int:
        return program.matrix(*matrix_parts(layers, program.dtype))

    return _Matrices(
        matrix(*layer.attention.projections),
        matrix(layer.attention.output),
        _inner_matrix(program, layer.mlp),
        matrix(layer.mlp.down),
    )


class _Buffers:
    """The buffers of one kind of rows, by what they hold; layers share them."""

    def __init__(self, program: NativeProgram, *, outputs: bool) -> None:
        self._program, self._outputs = program, outputs
        self._made: dict[tuple[str, int, Type], int] = {}

    def floats(self, name: str, columns: int) -> int:
        return self.of_type(name, columns, Type.FLOAT)

    def of_type(self, name: str, columns: int, kind: Type) -> int:
        made = self._made.get((name, columns, kind))
        if made is None:
            made = self._program.buffer(columns, kind=kind, outputs=self._outputs)
            self._made[name, columns, kind] = made
        return made

    def read_by(self, matrix: int, name: str, columns: int) -> int:
        """What ``matrix`` is multiplied with."""
        return self.of_type(name, columns, self._program.input_type(matrix))

    def before(self, matrix: int, name: str, columns: int) -> int:
        """Where what ``matrix`` reads is written in parts: whole rows alone can be split."""
        kind = self._program.input_type(matrix)
        return self.of_type(name, columns, Type.FLOAT if kind is Type.SPLIT else kind)

    def split(self, matrix: int, name: str, columns: int) -> int:
        """What :meth:`before` was written to, as ``matrix`` reads it."""
        source, wanted = self.before(matrix, name, columns), self.read_by(matrix, name, columns)
        if source != wanted:
            self._program.copy(source, wanted)
        return wanted


def _attend(
    program: NativeProgram, rows: _Buffers, layer: Layer, matrices: _Matrices, index: int,
    hidden: int,
) -> None:  # fmt: skip
    attention, shape = layer.attention, layer.attention.shape
    normed = _normed(program, rows, layer.before_attention, matrices.projections, hidden)
    if layer.parallel and program.input_type(matrices.inner) != program.input_type(
        matrices.projections
    ):
        _normed(program, rows, layer.before_attention, matrices.inner, hidden)
    projected = rows.floats("projected", shape.columns)
    program.linear(matrices.projections, normed, projected, bias=_biases(attention.projections))
    program.rotate(
        projected,
        shape,
        index,
        rotary=attention.rotary,
        query_norm=attention.query_norm,
        key_norm=attention.key_norm,
    )
    program.attend(
        projected,
        rows.before(matrices.output, "mixed", _mixed_columns(layer)),
        shape,
        index,
        scale=attention.scale,
        window=attention.geometry.window,
        softcap=attention.geometry.softcap,
        sinks=attention.sinks,
    )


def _go_on(
    program: NativeProgram, tokens: _Buffers, outputs: _Buffers, layer: Layer,
    matrices: _Matrices, hidden: int,
) -> None:  # fmt: skip
    program.copy(tokens.floats("stream", hidden), outputs.floats("stream", hidden))
    mixed = "mixed", _mixed_columns(layer)
    program.copy(tokens.before(matrices.output, *mixed), outputs.before(matrices.output, *mixed))
    if layer.parallel:
        normed = matrices.inner, "normed", hidden
        program.copy(tokens.read_by(*normed), outputs.read_by(*normed))


def _add_attention(
    program: NativeProgram, rows: _Buffers, layer: Layer, matrices: _Matrices, hidden: int
) -> None:
    _add_branch(
        program, rows, matrices.output, layer.attention.output.bias,
        rows.split(matrices.output, "mixed", _mixed_columns(layer)), layer.after_attention,
        layer.residual_factor, hidden,
    )  # fmt: skip


def _add_mlp(
    program: NativeProgram, rows: _Buffers, layer: Layer, matrices: _Matrices, hidden: int
) -> None:
    if layer.parallel:
        normed = rows.read_by(matrices.inner, "normed", hidden)
    else:
        normed = _normed(program, rows, layer.before_mlp, matrices.inner, hidden)
    mlp = layer.mlp
    inner = matrices.down, "inner", mlp.down.in_features
    program.linear(
        matrices.inner,
        normed,
        rows.before(*inner),
        bias=_biases(mlp.inner),
        activation=mlp.activation,
    )
    _add_branch(
        program, rows, matrices.down, mlp.down.bias, rows.split(*inner), layer.after_mlp,
        layer.residual_factor, hidden,
    )  # fmt: skip


def _add_branch(
    program: NativeProgram,
    rows: _Buffers,
    matrix: int,
    bias: Tensor | None,
    source: int,
    after: NormWeights | None,
    factor: float,
    hidden: int,
) -> None:
    """``stream += factor * after(matrix @ source + bias)``."""
    stream = rows.floats("stream", hidden)
    if after is None:
        program.linear(matrix, source, stream, bias=bias, add=True, scale=factor)
        return
    branch = rows.floats("branch", hidden)
    program.linear(matrix, source, branch, bias=bias, activation=Activation.NONE)
    program.norm(after, branch, stream, add=True, scale=factor)


def _normed(
    program: NativeProgram, rows: _Buffers, norm: NormWeights | None, matrix: int, hidden: int
) -> int:
    """The buffer of what ``matrix`` reads: the stream, normalised if there is a norm."""
    stream, normed = rows.floats("stream", hidden), rows.read_by(matrix, "normed", hidden)
    if norm is None:
        program.copy(stream, normed)
    else:
        program.norm(norm, stream, normed)
    return normed


def _mixed_columns(layer: Layer) -> int:
    return layer.attention.shape.heads * layer.attention.shape.value_dim


def _inner_matrix(program: NativeProgram, mlp: MLP) -> int:
    parts = matrix_parts(mlp.inner, program.dtype)
    if mlp.gated and len(parts) == 1:
        parts = parts[0].chunk(2)
    return program.matrix(*parts, gated=mlp.gated)


def _biases(linears: tuple[Linear, ...]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float()
            for linear in linears
        ]
    )
