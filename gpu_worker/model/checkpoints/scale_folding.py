"""Finds where a model's channels can be scaled without changing what it computes.

What writes the channels is divided by scales, and the linear layers that read them are multiplied.
A candidate counts only if the model's output stays the same under scales of which each is a power
of two: they are exact, so anything else that reads the channels, or bends them, shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..program.modules import Unrecognised, read_norm

__all__ = ["Fold", "find_folds"]

_PAIRS = (
    ("v_proj", "o_proj"), ("v_proj", "out_proj"), ("v_proj", "dense"), ("up_proj", "down_proj"),
    ("fc1", "fc2"), ("c_fc", "c_proj"),
)  # fmt: skip
"""Layers of one module of which the second reads the first's outputs, perhaps multiplied."""

_TOLERANCE = 1e-4
"""Of logits: a norm of one plus its weight is rounded when it is divided."""

_UNCALLED = "a layer beside it was not called in the trial"
_CHANGES = "scaling the channels before it changes the output"
_OTHERS = "the output layer, or one of another name, reads its inputs, too"
_ALONE = "nothing before it has a weight for each of its inputs"


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Channels that can be scaled.

    Attributes:
        source: the norm or linear layer that writes them.
        readers: the linear layers that read them, all that there are.
        offset: what a norm adds to its weight before it multiplies.
        copies: how often readers see each channel: heads that share keys and values.
        width: channels that are copied together.
    """

    source: str
    readers: tuple[str, ...]
    offset: int = 0
    copies: int = 1
    width: int = 1

    def spread(self, scales: Tensor) -> Tensor:
        """Of the source's channels to the readers' inputs."""
        return scales.view(-1, 1, self.width).expand(-1, self.copies, -1).reshape(-1)

    def gathered(self, magnitudes: Tensor) -> Tensor:
        """Of the readers' inputs to the source's channels, whose mean it is."""
        return magnitudes.view(-1, self.copies, self.width).mean(1).reshape(-1)

    def divided(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The source's weight, divided, in float32."""
        by = scales if weight.dim() == 1 else scales.unsqueeze(1)
        return (weight.float() + self.offset) / by - self.offset


@torch.inference_mode()
def find_folds(
    model: Any, names: Sequence[str], ids: list[int]
) -> tuple[list[Fold], dict[str, str]]:
    """All channels of ``model`` that linear layers read and that can be scaled.

    Args:
        model: of transformers, in float32; is changed and restored.
        names: of its linear layers that are to be quantised.
        ids: a few tokens to try it with.

    Returns:
        The folds, and for each layer without one the reason.
    """
    tokens = torch.tensor([ids])
    trace = _Trace()
    expected = trace.run(model, tokens)
    reasons = dict.fromkeys(names, _ALONE)
    candidates = _norm_folds(model, trace, frozenset(names), reasons)
    candidates += _pair_folds(model, names)
    kinds: dict[str, list[Fold]] = {}
    for fold in candidates:
        if _called(model, fold.source, trace.called):
            kinds.setdefault(fold.source.rpartition(".")[2], []).append(fold)
        else:
            reasons |= dict.fromkeys(fold.readers, _UNCALLED)
    found = [fold for kind in kinds.values() for fold in _holding(model, kind, tokens, expected)]
    sound = {reader for fold in found for reader in fold.readers}
    for kind in kinds.values():
        for fold in kind:
            reasons |= dict.fromkeys(set(fold.readers) - sound, _CHANGES)
    return found, {name: why for name, why in reasons.items() if name not in sound}


@dataclass(slots=True)
class _Trace:
    """Which linear layers read the very tensor that a norm wrote."""

    readers: dict[str, list[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    _written: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    def run(self, model: Any, tokens: Tensor) -> Tensor:
        """One forward; the logits."""
        handles = []
        try:
            for name, module in model.named_modules():
                if type(module) is nn.Linear:
                    handles.append(module.register_forward_pre_hook(self._reads(name)))
                elif _is_norm(module):
                    handles.append(module.register_forward_hook(self._writes(name)))
            return _logits(model, tokens)
        finally:
            for handle in handles:
                handle.remove()
            self._written.clear()

    def _writes(self, name: str) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            # The tensor is held, so that no other comes to lie at its address.
            if isinstance(output, Tensor):
                self._written[output.data_ptr()] = name, output

        return hook

    def _reads(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.called.add(name)
            writer, written = self._written.get(inputs[0].data_ptr() if inputs else 0, ("", None))
            if written is not None and written.numel() == inputs[0].numel():
                found = self.readers.setdefault(writer, [])
                if name not in found:
                    found.append(name)

        return hook


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())


def _norm_folds(
    model: Any, trace: _Trace, names: frozenset[str], reasons: dict[str, str]
) -> list[Fold]:
    folds = []
    for source, readers in trace.readers.items():
        if not names.issuperset(readers):
            reasons |= dict.fromkeys(names.intersection(readers), _OTHERS)
            continue
        module = model.get_submodule(source)
        weight = module.weight
        try:
            norm = read_norm(module, weight.shape[0])
        except Unrecognised as error:
            reasons |= dict.fromkeys(readers, f"{error}, which is not known, is before it")
            continue
        plain = norm.weight is not None and torch.equal(norm.weight, weight.float())
        folds.append(Fold(source, tuple(readers), offset=0 if plain else 1))
    return folds


def _pair_folds(model: Any, names: Sequence[str]) -> list[Fold]:
    known, folds = frozenset(names), []
    for name in names:
        parent, _, last = name.rpartition(".")
        for first, second in _PAIRS:
            reader = f"{parent}.{second}"
            if last != first or reader not in known:
                continue
            outputs = model.get_submodule(name).out_features
            inputs = model.get_submodule(reader).in_features
            heads = int(getattr(model.get_submodule(parent), "head_dim", 0) or outputs)
            if inputs % outputs == 0 and outputs % heads == 0:
                width = heads if inputs > outputs else outputs
                folds.append(Fold(name, (reader,), copies=inputs // outputs, width=width))
    return folds


def _called(model: Any, source: str, called: set[str]) -> bool:
    """Whether the trial called all linear layers beside ``source``: others may read it, too."""
    parent = source.rpartition(".")[0]
    return all(
        type(module) is not nn.Linear or f"{parent}.{name}" in called
        for name, module in model.get_submodule(parent).named_modules()
    )


def _holding(model: Any, folds: list[Fold], tokens: Tensor, expected: Tensor) -> list[Fold]:
    """Those that leave the output as it is: all at once, or halves of them."""
    if not folds or _holds(model, folds, tokens, expected):
        return folds
    if len(folds) == 1:
        return []
    middle = len(folds) // 2
    halves = folds[:middle], folds[middle:]
    return [fold for half in halves for fold in _holding(model, half, tokens, expected)]


def _holds(model: Any, folds: list[Fold], tokens: Tensor, expected: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    tried = []
    for fold in folds:
        channels = model.get_submodule(fold.source).weight.shape[0]
        tried.append((fold, 2.0 ** torch.randint(-2, 3, (channels,), generator=generator)))
    for fold, scales in tried:
        _scale(model, fold, scales)
    found = _logits(model, tokens)
    for fold, scales in tried:
        _scale(model, fold, 1 / scales)
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _scale(model: Any, fold: Fold, scales: Tensor) -> None:
    source = model.get_submodule(fold.source)
    source.weight.copy_(fold.divided(source.weight, scales))
    if getattr(source, "bias", None) is not None:
        source.bias.div_(scales)
    for reader in fold.readers:
        model.get_submodule(reader).weight.mul_(fold.spread(scales))


def _logits(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()  # type: ignore[no-any-return]
