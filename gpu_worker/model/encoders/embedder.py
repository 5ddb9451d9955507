"""Embeddings, as sentence-transformers computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from penstock.shared.errors import InvalidRequest, ModelError
from penstock.shared.protocol.payload import MAX_RESULT_BYTES
from penstock.shared.protocol.states import ModelKind

from .encoder import Group, Row
from .encoder_batcher import EncoderBatcher, check_fields
from .encoder_items import Work, estimate_tokens, read_flag, read_texts
from .encoder_recipe import DenseStep
from .pooling import pool

__all__ = ["Embedder"]

_FIELDS = ("dimensions", "input", "normalize", "prompt_name", "truncate")
_USUAL_PROMPTS = frozenset({"document", "query"})


class _Options(NamedTuple):
    """What an item asks for: numbers to keep, length 1, and the prompt put before each text."""

    dimensions: int | None
    normalize: bool
    prompt: str


class Embedder(EncoderBatcher):
    """Turns texts into vectors.

    An item is a map. ``input`` is a list of texts and lists of token ids, ``dimensions`` how many
    numbers to keep. ``normalize`` gives each vector length 1, ``prompt_name`` names one of the
    checkpoint's prompts, ``truncate`` cuts texts that are too long. Its answer is a map:
    ``embeddings``, for each text the numbers as little-endian float32, and ``tokens``.

    Args:
        path, dtype, device, max_tokens: see :func:`.encoder.load_encoder`.
    """

    kind = ModelKind.EMBED

    def load(self) -> None:
        """Load the checkpoint.

        Raises:
            ConfigurationError, ModelError: see :func:`.encoder.load_encoder`.
        """
        super().load()
        recipe = self.encoder.recipe
        self._dense = [_load_dense(step, self.encoder.model) for step in recipe.dense]
        trial = self.encoder.run([Row([5 % self.encoder.vocab_size] * 4)])
        self.width = self._embed(next(iter(trial)), torch.zeros(1, dtype=torch.int64)).shape[1]
        self._prompt_lengths: dict[str, int] = {}

    def cost(self, item: object) -> int:
        """About how many tokens an item has."""
        return estimate_tokens(item.get("input")) if isinstance(item, Mapping) else 1

    def _read(self, item: Mapping[str, Any]) -> Work:
        check_fields(item, *_FIELDS)
        texts = read_texts(item.get("input"), "input")
        prompt = self._prompt(item.get("prompt_name"))
        if prompt:
            texts = [prompt + text if isinstance(text, str) else text for text in texts]
        fields = [f"input[{number}]" for number in range(len(texts))]
        wanted = item.get("dimensions")
        if wanted is not None and not (type(wanted) is int and 1 <= wanted <= self.width):
            allowed = f"1 to {self.width}, the length of this model's embeddings"
            raise InvalidRequest("dimensions", wanted, allowed)
        most = MAX_RESULT_BYTES // (4 * (wanted or self.width) + 16)
        if len(texts) > most:
            allowed = f"at most {most} texts, whose embeddings fit into one answer; divide them"
            raise InvalidRequest("input", f"{len(texts)} texts", allowed)
        options = _Options(wanted, read_flag(item, "normalize"), prompt)
        return Work(texts, fields, read_flag(item, "truncate"), options)

    def _prompt(self, name: object) -> str:
        recipe = self.encoder.recipe
        if name is None:
            return recipe.default_prompt
        # sentence-transformers takes the usual ones for empty where a checkpoint has none.
        if isinstance(name, str) and (name in recipe.prompts or name in _USUAL_PROMPTS):
            return recipe.prompts.get(name, "")
        known = ", ".join(sorted({*recipe.prompts, *_USUAL_PROMPTS}))
        raise InvalidRequest("prompt_name", name, f"a prompt of this model: {known}")

    def _compute(self, rows: Sequence[Row], works: Sequence[Work]) -> Tensor:
        """Embeddings on the CPU ``[rows, width]``, float32."""
        skip = torch.tensor([self._skipped(work) for work in works], device=self.encoder.device)
        result = torch.empty(len(rows), self.width)
        for group in self.encoder.run(rows):
            result[group.indexes] = self._embed(group, skip[group.indexes]).float().cpu()
        return result

    def _skipped(self, work: Work) -> int:
        """Tokens of the prompt that do not count in the pooling."""
        prompt = work.options.prompt
        if self.encoder.recipe.pools_prompt or not prompt:
            return 0
        if prompt not in self._prompt_lengths:
            self._prompt_lengths[prompt] = self.encoder.count_prompt(prompt)
        return self._prompt_lengths[prompt]

    @torch.inference_mode()
    def _embed(self, group: Group, skip: Tensor) -> Tensor:
        recipe = self.encoder.recipe
        vectors = pool(group.output, group.lengths, skip.to(group.output.device), recipe.pooling)
        for layer in self._dense:
            vectors = layer(vectors)
        return normalize(vectors, dim=-1) if recipe.normalized else vectors

    def _answer(self, work: Work, values: Tensor, num_tokens: int) -> dict[str, Any]:
        options: _Options = work.options
        default = self.encoder.recipe.dimensions
        if options.dimensions is not None or default is not None:
            values = values[:, : options.dimensions or default]
        shortened = options.dimensions is not None and self.encoder.recipe.normalized
        if options.normalize or shortened:
            values = normalize(values, dim=-1)
        # numpy's arrays give their bytes at once; the wire is little-endian, like all machines here
        packed = [vector.tobytes() for vector in values.numpy().astype("<f4")]
        return {"embeddings": packed, "tokens": num_tokens}


def _load_dense(step: DenseStep, model: Any) -> nn.Module:
    """A linear layer of the checkpoint, on the model's device and in its dtype.

    Raises:
        ModelError: its weights are missing or damaged.
    """
    try:
        file = step.folder / "model.safetensors"
        if file.is_file():
            weights = load_file(file)
        else:
            weights = torch.load(
                step.folder / "pytorch_model.bin", map_location="cpu", weights_only=True
            )
        width_out, width_in = weights["linear.weight"].shape
        layer = nn.Linear(width_in, width_out, bias=step.bias)
        layer.load_state_dict({k.removeprefix("linear."): v for k, v in weights.items()})
    except Exception as error:
        raise ModelError(
            f"the weights of the layer in {step.folder} cannot be loaded ({str(error)[:200]}); "
            "copy the checkpoint again"
        ) from error
    whole = nn.Sequential(layer, getattr(nn, step.activation)())
    return whole.to(model.device, model.dtype).eval().requires_grad_(False)
