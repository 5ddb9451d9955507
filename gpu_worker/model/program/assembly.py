"""Makes a native program of a decoder's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu import (
    LOGITS,
    Activation,
    Library,
    MatrixForm,
    NativeProgram,
    NormWeights,
    Type,
    WeightsFile,
)

from ..quantization.coding import Linear, matrix_parts
from .description import Decoder, Layer
from .feed_forward import MLP, Experts

__all__ = ["assemble"]


def assemble(
    decoder: Decoder,
    library: Library,
    dtype: torch.dtype,
    packed: WeightsFile | None = None,
    forms: Sequence[MatrixForm] | None = None,
) -> NativeProgram:
    """The program of ``decoder``; its weights are packed copies, but for the embedding.

    Args:
        decoder: what to compute.
        library: what computes it.
        dtype: of weights and KV, float32 or bfloat16.
        packed: a file with the weights of its :class:`.MappedLinear` layers, which are all then.
        forms: of its matrices, from an earlier program of the same weights.
    """
    program = NativeProgram(library, dtype, packed, forms)
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
        if isinstance(layer.feed_forward, Experts):
            _add_experts(program, rows, layer, layer.feed_forward, matrices, hidden)
        else:
            _add_mlp(program, rows, layer, layer.feed_forward, matrices, hidden)
    head = program.matrix(*matrix_parts([decoder.head], dtype))
    program.linear(
        head,
        _normed(program, outputs, decoder.norm, head, hidden),
        LOGITS,
        bias=decoder.head.bias,
        scale=decoder.logit_factor,
        softcap=decoder.logit_softcap,
        screened=True,
    )
    program.pack()
    return program


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Of one layer.

    Attributes:
        projections: of queries, keys and values.
        output: behind attention.
        router: of experts; None: there is one MLP.
        inner: of the MLP, or of each expert.
        down: back from ``inner``, one for each.
    """

    projections: int
    output: int
    router: int | None
    inner: tuple[int, ...]
    down: tuple[int, ...]


def _matrices(program: NativeProgram, layer: Layer) -> _Matrices:
    def matrix(*layers: Linear) -> int:
        return program.matrix(*matrix_parts(layers, program.dtype))

    branch = layer.feed_forward
    mlps = branch.experts if isinstance(branch, Experts) else (branch,)
    return _Matrices(
        matrix(*layer.attention.projections),
        matrix(layer.attention.output),
        matrix(branch.router) if isinstance(branch, Experts) else None,
        tuple(_inner_matrix(program, mlp) for mlp in mlps),
        tuple(matrix(mlp.down) for mlp in mlps),
    )


class _Buffers:
    """The buffers of one kind of rows, by what they hold; layers share them."""

    def __init__(self, program: NativeProgram, *, outputs: bool) -> None:
        self._program, self._outputs = program, outputs
        self._made: dict[tuple[str, int, Type], int] = {}

    def floats(self, name: str, columns: int, copies: int = 1) -> int:
        return self.of_type(name, columns, Type.FLOAT, copies)

    def of_type(self, name: str, columns: int, kind: Type, copies: int = 1) -> int:
        """``copies``: of each row; a name always has as many."""
        made = self._made.get((name, columns, kind))
        if made is None:
            made = self._program.buffer(columns, kind=kind, outputs=self._outputs, copies=copies)
            self._made[name, columns, kind] = made
        return made

    def read_by(self, matrix: int, name: str, columns: int, copies: int = 1) -> int:
        """What ``matrix`` is multiplied with."""
        return self.of_type(name, columns, self._program.input_type(matrix), copies)

    def before(self, matrix: int, name: str, columns: int, copies: int = 1) -> int:
        """Where what ``matrix`` reads is written in parts: whole rows alone can be split."""
        kind = self._program.input_type(matrix)
        return self.of_type(name, columns, Type.FLOAT if kind is Type.SPLIT else kind, copies)

    def split(self, matrix: int, name: str, columns: int, copies: int = 1) -> int:
        """What :meth:`before` was written to, as ``matrix`` reads it."""
        source = self.before(matrix, name, columns, copies)
        wanted = self.read_by(matrix, name, columns, copies)
        if source != wanted:
            self._program.copy(source, wanted)
        return wanted


def _attend(
    program: NativeProgram, rows: _Buffers, layer: Layer, matrices: _Matrices, index: int,
    hidden: int,
) -> None:  # fmt: skip
    attention, shape = layer.attention, layer.attention.shape
    normed = _normed(program, rows, layer.before_attention, matrices.projections, hidden)
    if layer.parallel and program.input_type(matrices.inner[0]) != program.input_type(
        matrices.projections
    ):
        _normed(program, rows, layer.before_attention, matrices.inner[0], hidden)
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
        normed = matrices.inner[0], "normed", hidden
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
    program: NativeProgram, rows: _Buffers, layer: Layer, mlp: MLP, matrices: _Matrices, hidden: int
) -> None:
    inner, down = matrices.inner[0], matrices.down[0]
    if layer.parallel:
        normed = rows.read_by(inner, "normed", hidden)
    else:
        normed = _normed(program, rows, layer.before_mlp, inner, hidden)
    between = down, "inner", mlp.down.in_features
    program.linear(
        inner,
        normed,
        rows.before(*between),
        bias=_biases(mlp.inner),
        activation=mlp.activation,
    )
    _add_branch(
        program, rows, down, mlp.down.bias, rows.split(*between), layer.after_mlp,
        layer.residual_factor, hidden,
    )  # fmt: skip


def _add_experts(
    program: NativeProgram, rows: _Buffers, layer: Layer, mixture: Experts, matrices: _Matrices,
    hidden: int,
) -> None:  # fmt: skip
    assert matrices.router is not None
    count, copies = len(mixture.experts), mixture.chosen
    numbers = rows.floats("routed", count)
    normed = _normed(program, rows, layer.before_mlp, matrices.router, hidden)
    program.linear(matrices.router, normed, numbers, bias=mixture.router.bias)
    program.route(numbers, count, copies, normalised=mixture.normalised)

    inner, down = matrices.inner[0], matrices.down[0]
    if program.input_type(inner) != program.input_type(matrices.router):
        normed = _normed(program, rows, layer.before_mlp, inner, hidden)
    gathered = rows.read_by(inner, "gathered", hidden, copies)
    program.gather(normed, gathered)
    first = mixture.experts[0]
    between = down, "inner of experts", first.down.in_features, copies
    program.experts(
        matrices.inner,
        gathered,
        rows.before(*between),
        bias=_stacked([_biases(expert.inner) for expert in mixture.experts]),
        activation=first.activation,
        clamp=mixture.clamp,
    )
    computed = rows.floats("computed", hidden, copies)
    program.experts(
        matrices.down,
        rows.split(*between),
        computed,
        bias=_stacked([_biases((expert.down,)) for expert in mixture.experts]),
    )
    stream = rows.floats("stream", hidden)
    if layer.after_mlp is None:
        program.combine(computed, stream, add=True, scale=layer.residual_factor)
        return
    branch = rows.floats("branch", hidden)
    program.combine(computed, branch)
    program.norm(layer.after_mlp, branch, stream, add=True, scale=layer.residual_factor)


def _stacked(biases: list[Tensor | None]) -> Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if len(found) == len(biases) else None


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
