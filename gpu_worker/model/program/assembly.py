"""Makes a native program of a decoder's description."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu import LOGITS, Activation, Library, NativeProgram, NormWeights

from ..quantization.coding import Linear, matrix_parts
from .description import MLP, Attention, Decoder, Layer

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
        rows = tokens
        _attend(program, rows, layer, index, hidden)
        if index == len(decoder.layers) - 1:
            # Behind the last attention no row needs another: only those with logits go on.
            rows = outputs
            _go_on(program, tokens, outputs, layer, hidden)
        _add_attention(program, rows, layer, hidden)
        _add_mlp(program, rows, layer, hidden)
    normed = outputs.multiplied("normed", hidden)
    program.norm(decoder.norm, outputs.floats("stream", hidden), normed)
    program.linear(
        program.matrix(*matrix_parts([decoder.head], dtype)),
        normed,
        LOGITS,
        bias=decoder.head.bias,
        scale=decoder.logit_factor,
        softcap=decoder.logit_softcap,
    )
    program.pack()
    return program


class _Buffers:
    """The buffers of one kind of rows, by what they hold; layers share them."""

    def __init__(self, program: NativeProgram, *, outputs: bool) -> None:
        self._program, self._outputs = program, outputs
        self._made: dict[tuple[str, int], int] = {}

    def floats(self, name: str, columns: int) -> int:
        return self._get(name, columns, multiplied=False)

    def multiplied(self, name: str, columns: int) -> int:
        return self._get(name, columns, multiplied=True)

    def _get(self, name: str, columns: int, *, multiplied: bool) -> int:
        made = self._made.get((name, columns))
        if made is None:
            made = self._program.buffer(columns, multiplied=multiplied, outputs=self._outputs)
            self._made[name, columns] = made
        return made


def _attend(program: NativeProgram, rows: _Buffers, layer: Layer, index: int, hidden: int) -> None:
    attention, shape = layer.attention, layer.attention.shape
    normed = _normed(program, rows, layer.before_attention, hidden)
    projected = rows.floats("projected", shape.columns)
    program.linear(
        program.matrix(*matrix_parts(attention.projections, program.dtype)),
        normed,
        projected,
        bias=_biases(attention.projections),
    )
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
        _mixed(rows, attention),
        shape,
        index,
        scale=attention.scale,
        window=attention.geometry.window,
        softcap=attention.geometry.softcap,
        sinks=attention.sinks,
    )


def _go_on(
    program: NativeProgram, tokens: _Buffers, outputs: _Buffers, layer: Layer, hidden: int
) -> None:
    program.copy(tokens.floats("stream", hidden), outputs.floats("stream", hidden))
    program.copy(_mixed(tokens, layer.attention), _mixed(outputs, layer.attention))
    if layer.parallel:
        program.copy(tokens.multiplied("normed", hidden), outputs.multiplied("normed", hidden))


def _add_attention(program: NativeProgram, rows: _Buffers, layer: Layer, hidden: int) -> None:
    _add_branch(
        program, rows, layer.attention.output, _mixed(rows, layer.attention), layer.after_attention,
        layer.residual_factor, hidden,
    )  # fmt: skip


def _add_mlp(program: NativeProgram, rows: _Buffers, layer: Layer, hidden: int) -> None:
    if layer.parallel:
        normed = rows.multiplied("normed", hidden)
    else:
        normed = _normed(program, rows, layer.before_mlp, hidden)
    mlp = layer.mlp
    inner = rows.multiplied("inner", mlp.down.in_features)
    program.linear(
        _inner_matrix(program, mlp),
        normed,
        inner,
        bias=_biases(mlp.inner),
        activation=mlp.activation,
    )
    _add_branch(program, rows, mlp.down, inner, layer.after_mlp, layer.residual_factor, hidden)


def _add_branch(
    program: NativeProgram,
    rows: _Buffers,
    linear: Linear,
    source: int,
    after: NormWeights | None,
    factor: float,
    hidden: int,
) -> None:
    """``stream += factor * after(linear(source))``."""
    stream = rows.floats("stream", hidden)
    matrix = program.matrix(*matrix_parts([linear], program.dtype))
    if after is None:
        program.linear(matrix, source, stream, bias=linear.bias, add=True, scale=factor)
        return
    branch = rows.floats("branch", hidden)
    program.linear(matrix, source, branch, bias=linear.bias, activation=Activation.NONE)
    program.norm(after, branch, stream, add=True, scale=factor)


def _normed(program: NativeProgram, rows: _Buffers, norm: NormWeights | None, hidden: int) -> int:
    stream, normed = rows.floats("stream", hidden), rows.multiplied("normed", hidden)
    if norm is None:
        program.copy(stream, normed)
    else:
        program.norm(norm, stream, normed)
    return normed


def _mixed(rows: _Buffers, attention: Attention) -> int:
    return rows.multiplied("mixed", attention.shape.heads * attention.shape.value_dim)


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
