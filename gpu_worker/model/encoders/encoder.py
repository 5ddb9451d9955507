"""A transformers encoder on its device, and texts on their way through it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTextEncoding

from penstock.shared.errors import ConfigurationError, UnsupportedModel
from penstock.shared.protocol.states import ModelKind

from ..kv.memory_budget import available_bytes
from ..loading.checkpoint import find_checkpoint, load_config, load_tokenizer, load_weights, quiet
from ..loading.loader import DTYPES, pick_device
from ..loading.prepack import prepack_linears
from .encoder_recipe import EncoderRecipe, read_recipe
from .length_groups import length_groups

__all__ = ["Encoder", "Group", "Row", "Text", "load_encoder"]

_log = logging.getLogger("penstock.model")

Text = str | Sequence[int] | tuple[str, str]
"""A text, its token ids, or two texts that are read together."""

_PASS_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Tokens of one pass at most, padding included: more gain nothing, and activations grow."""

_TRIAL_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


class Row(NamedTuple):
    """An input as the model reads it.

    Attributes:
        ids: its tokens, special ones among them.
        types: which of two texts each token belongs to; None where the model does not ask.
    """

    ids: Sequence[int]
    types: Sequence[int] | None = None


class Group(NamedTuple):
    """Rows that were computed together.

    Attributes:
        indexes: of the rows ``[rows]``.
        lengths: tokens of each ``[rows]``, int64.
        output: last hidden states ``[rows, tokens, width]``, or logits ``[rows, labels]``.
    """

    indexes: list[int]
    lengths: Tensor
    output: Tensor


class Encoder:
    """A model with its tokenizer. Not thread-safe.

    Args:
        model: of transformers, in eval mode.
        tokenizer: of transformers.
        recipe: what the checkpoint's files say.
        folder: where it comes from.
        max_tokens: of one input; None takes what tokenizer and model allow.

    Attributes:
        max_tokens: of one input, special tokens included.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        recipe: EncoderRecipe,
        folder: Path,
        max_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.folder = folder
        self.device: torch.device = model.device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._tokenizer = tokenizer
        self._on_pass: Callable[[], None] = lambda: None
        self._types = "token_type_ids" in tokenizer.model_input_names
        self._pad = _pad_id(model, tokenizer, folder)
        self.max_tokens = self._limit(max_tokens)
        if recipe.lower_case:
            _lower_case(tokenizer)

    def rows(self, texts: Sequence[Text]) -> list[Row]:
        """Tokens of texts, with special tokens; token ids are taken as they are. Nothing is cut."""
        rows: list[Row] = [Row(())] * len(texts)
        kinds: dict[type, list[int]] = {str: [], tuple: []}
        for index, text in enumerate(texts):
            if isinstance(text, str):
                kinds[str].append(index)
            elif _is_pair(text):
                kinds[tuple].append(index)
            else:
                rows[index] = Row(text)  # type: ignore[arg-type]
        if kinds[str]:
            self._encode(rows, kinds[str], [texts[index] for index in kinds[str]])
        if kinds[tuple]:
            first, second = zip(*(texts[index] for index in kinds[tuple]), strict=True)
            self._encode(rows, kinds[tuple], list(first), list(second))
        return rows

    def cut(self, text: Text) -> Row:
        """A text's tokens, cut to the limit; of two texts the longer one is cut first."""
        if not isinstance(text, str) and not _is_pair(text):
            return Row(text[: self.max_tokens])  # type: ignore[arg-type]
        pair = (text,) if isinstance(text, str) else text
        encoded = self._tokenizer(
            *pair, truncation="longest_first", max_length=self.max_tokens, verbose=False
        )
        return Row(encoded["input_ids"], encoded.get("token_type_ids") if self._types else None)

    def count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt at the beginning of a text, without a special one at its end."""
        ids = list(self._tokenizer(prompt, verbose=False)["input_ids"])
        return len(ids) - (ids[-1] in self._tokenizer.all_special_ids) if ids else 0

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> Iterator[Group]:
        """Compute rows in groups of like length; every row comes once."""
        budget = _PASS_TOKENS[self.device.type]
        for indexes in length_groups([len(row.ids) for row in rows], budget):
            yield self._run_group([rows[index] for index in indexes], indexes)
            self._on_pass()

    def after_each_pass(self, call: Callable[[], None]) -> None:
        """Have something called after each pass, such as a sign of life in a long batch."""
        self._on_pass = call

    def check(self) -> None:
        """Compute something, and see that padding changes nothing.

        Raises:
            UnsupportedModel: it cannot be computed, or the model reads the padding.
        """
        rows = [Row([5 % self.vocab_size] * length) for length in (7, 3)]
        try:
            with torch.inference_mode():
                together = self._run_group(rows, [0, 1]).output[1]
                alone = self._run_group(rows[1:], [0]).output[0]
        except Exception as error:
            raise UnsupportedModel(
                f"the model in {self.folder} fails in a trial: {str(error)[:300]}"
            ) from error
        if together.ndim > 1:
            together = together[: len(alone)]
        difference = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
        if not difference <= _TRIAL_TOLERANCE.get(alone.dtype, _HALF_TOLERANCE):
            raise UnsupportedModel(
                f"the model in {self.folder} gives other values beside a longer text (they differ "
                f"by {difference:.2g}): it would be silently wrong in a batch"
            )

    @torch.inference_mode()
    def trial(self) -> Tensor:
        """The output for some fixed input."""
        return self._run_group([Row([5 % self.vocab_size] * 16)], [0]).output

    def _run_group(self, rows: Sequence[Row], indexes: list[int]) -> Group:
        lengths = [len(row.ids) for row in rows]
        longest = max(lengths)
        inputs = {
            "input_ids": torch.tensor(
                [[*row.ids, *[self._pad] * (longest - len(row.ids))] for row in rows]
            ),
            "attention_mask": torch.tensor(
                [[1] * length + [0] * (longest - length) for length in lengths]
            ),
        }
        if any(row.types for row in rows):
            types = [list(row.types or [0] * len(row.ids)) for row in rows]
            inputs["token_type_ids"] = torch.tensor(
                [row + [0] * (longest - len(row)) for row in types]
            )
        on_device = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        output = self.model(**on_device)
        embeds = self.recipe.kind is ModelKind.EMBED
        values = output.last_hidden_state if embeds else output.logits
        return Group(indexes, torch.tensor(lengths, device=self.device), values)

    def _encode(self, rows: list[Row], indexes: list[int], *texts: list[Any]) -> None:
        encoded = self._tokenizer(*texts, verbose=False)
        types = encoded.get("token_type_ids") if self._types and len(texts) > 1 else None
        for number, index in enumerate(indexes):
            rows[index] = Row(
                encoded["input_ids"][number], None if types is None else types[number]
            )

    def _limit(self, wanted: int | None) -> int:
        most: int = min(self._tokenizer.model_max_length, _positions(self.model))
        named = self.recipe.max_tokens
        if wanted is not None and wanted > most:
            raise ConfigurationError(
                f"model.max_model_len: got {wanted}; allowed: at most {most} for {self.folder}"
            )
        return min(most, wanted or named or most)


def load_encoder(
    path: str | Path,
    *,
    kind: ModelKind | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_tokens: int | None = None,
) -> Encoder:
    """Load an encoder from a directory. Nothing is downloaded, and no code out of it is run.

    Args:
        path: the directory.
        kind: what it shall answer; None takes what its files say.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``auto``: float32 on CPU, else the
            checkpoint's own.
        device: ``cpu``, ``cuda``, ``cuda:1`` ... or ``auto``.
        max_tokens: of one input; None takes the checkpoint's limit.

    Raises:
        ConfigurationError: ``dtype``, ``device`` or ``max_tokens`` cannot be had.
        ModelError: the checkpoint is missing, damaged, incomplete, or not served here.
    """
    begin = time.perf_counter()
    folder = find_checkpoint(path)
    recipe = read_recipe(folder, kind)
    target = pick_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigurationError(f"dtype: got {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
    with quiet():
        config = load_config(folder)
        tokenizer = load_tokenizer(folder)
        stored = DTYPES.get(dtype, torch.float32 if target.type == "cpu" else "auto")
        head: Any = AutoModelForSequenceClassification
        if recipe.kind is ModelKind.EMBED:
            head = AutoModelForTextEncoding if _is_half(config) else AutoModel
        model = load_weights(folder, config, stored, target, head=head, unused=("pooler.",))
    model.config.use_cache = False
    encoder = Encoder(model, tokenizer, recipe, folder, max_tokens)
    encoder.check()
    if target.type == "cpu":
        prepack_linears(model, encoder.trial, available_bytes(target) // 8)
    _log.info(
        "loaded %s from %s in %.1f s: %s, %s on %s, inputs of %d tokens", config.model_type, folder,
        time.perf_counter() - begin, recipe.kind, str(model.dtype).removeprefix("torch."), target,
        encoder.max_tokens,
    )  # fmt: skip
    return encoder


def _is_half(config: Any) -> bool:
    """Whether the encoder is one half of an architecture that has a decoder, too."""
    names = config.architectures or [""]
    return bool(config.is_encoder_decoder) or names[0].endswith("EncoderModel")


def _is_pair(text: Text) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], str)


def _pad_id(model: Any, tokenizer: Any, folder: Path) -> int:
    """The token of padding. A classification head finds the end of a text by it."""
    for owner in (tokenizer, model.config):
        if (pad := getattr(owner, "pad_token_id", None)) is not None:
            model.config.pad_token_id = pad
            return int(pad)
    raise UnsupportedModel(
        f"the tokenizer in {folder} names no padding token; set pad_token in its "
        "tokenizer_config.json"
    )


def _positions(model: Any) -> int:
    """Tokens that the model has positions for."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = int(limit) if isinstance(limit, int) and limit > 0 else 1 << 20
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from behind the padding's own number.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            most = min(most, module.num_embeddings - offset)
    return most


def _lower_case(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    first = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = Normalizers([Lowercase(), *first])
