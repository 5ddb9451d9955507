"""Finds the parameters that hold all experts' weights, and puts quantised stacks in their place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .form import QuantizedWeight
from .quantized_modules import QuantizedStack

__all__ = ["Mixture", "find_mixtures"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A module that computes experts, each parameter of which has a weight of every expert.

    Attributes:
        owner: the module.
        name: of the module in the model.
        stacks: the parameters' names in the module, first that which reads the module's input.
    """

    owner: Any
    name: str
    stacks: tuple[str, ...]

    def num_bytes(self, stack: str) -> int:
        """Of a parameter."""
        return int(getattr(self.owner, stack).nbytes)

    def weights(self, stack: str) -> Iterator[Tensor]:
        """Of every expert ``[outputs, inputs]``."""
        for weight in getattr(self.owner, stack).detach():
            yield weight.T.contiguous() if self.owner.is_transposed else weight

    def replace(
        self, quantized: Mapping[str, Sequence[QuantizedWeight]], dtype: torch.dtype
    ) -> bool:
        """Let codes stand for parameters, which are freed; False: they stay.

        They stay where the module's forward does not read its experts one by one.
        """
        config, first = self.owner.config, next(self.weights(self.stacks[0]))
        way = config._experts_implementation  # noqa: SLF001
        full = {stack: getattr(self.owner, stack) for stack in quantized}
        for stack, experts in quantized.items():
            delattr(self.owner, stack)
            coded = QuantizedStack(experts, dtype, transposed=self.owner.is_transposed)
            setattr(self.owner, stack, coded)
        # Experts are taken from a stack one by one, which only this way of computing them does.
        config._experts_implementation = "eager"  # noqa: SLF001
        try:
            self._try(first)
        except Exception as error:
            log.warning(
                "%s stays in full, its forward needs whole parameters: %s", self.name, error
            )
            for stack, parameter in full.items():
                delattr(self.owner, stack)
                setattr(self.owner, stack, parameter)
            config._experts_implementation = way  # noqa: SLF001
            return False
        return True

    @torch.inference_mode()
    def _try(self, like: Tensor) -> None:
        rows = like.new_ones(2, like.shape[1])
        chosen = torch.zeros(2, 1, dtype=torch.int64, device=like.device)
        self.owner(rows, chosen, like.new_ones(2, 1))


def find_mixtures(model: nn.Module) -> list[Mixture]:
    """All modules whose experts transformers computes in several ways."""
    found = []
    for name, module in model.named_modules():
        if not (hasattr(module, "is_transposed") and hasattr(module, "config")):
            continue
        parameters = module.named_parameters(recurse=False)
        stacks = tuple(stack for stack, parameter in parameters if parameter.dim() == 3)
        if stacks:
            found.append(Mixture(module, name, stacks))
    return found
