"""What a model is verified on: prompts and a text, for any vocabulary and without a download."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.text.prompt_tokenizer import encode_prompt
from penstock.shared.errors import ConfigurationError, InvalidRequest

__all__ = ["Inputs", "default_prompts", "gather_inputs", "text_windows"]

_TEXTS = (
    "The water runs through the pipe and",
    "def read_lines(path):\n    ",
    "Once upon a time, in a village by the river,",
    "1, 2, 3, 5, 8, 13,",
    "Größe, café, naïve: 你好, 日本語, 🌊.",
    "Return a new sorted list from the items in",
)

_LONGEST_PROMPT = 80
"""Tokens of a prompt drawn at random: several chunks, and cheap for a large model on a CPU."""

_TEXT_CHARACTERS = 2000
_RANDOM_TEXT_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Inputs:
    """Token ids, all of them within the model's context.

    Attributes:
        prompts: at least one.
        text_ids: of the text whose perplexity is compared; at least two.
        notes: what was done otherwise than asked.
    """

    prompts: tuple[tuple[int, ...], ...]
    text_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def gather_inputs(
    loaded: LoadedModel,
    *,
    prompts_file: Path | None,
    prompts_count: int,
    text_file: Path | None,
    max_tokens: int,
    seed: int,
) -> Inputs:
    """Read and encode what was given, and fill in what was not.

    Args:
        loaded: the model.
        prompts_file: one prompt per line: text, or in a ``.jsonl`` file a JSON string, a list of
            token ids or a list of chat messages. None draws ``prompts_count`` by ``seed``.
        prompts_count: how many to draw.
        text_file: UTF-8 text. None takes an excerpt of Python's own reference.
        max_tokens: output tokens that must fit behind each prompt.
        seed: of what is drawn.

    Raises:
        ConfigurationError: a file cannot be read, is empty, or a prompt in it does not fit.
    """
    rng = random.Random(seed)
    longest = loaded.max_model_len - max_tokens
    if longest < 1:
        raise ConfigurationError(
            f"--max-tokens: got {max_tokens}; allowed: below {loaded.max_model_len}, the model's "
            "context, of which the prompt takes at least one token"
        )
    if prompts_file is None:
        prompts = default_prompts(loaded.tokenizer, loaded.vocab_size, prompts_count, longest, rng)
    else:
        prompts = _read_prompts(loaded, prompts_file, longest)
    notes: list[str] = []
    if text_file is None:
        text_ids = _default_text(loaded)
        if len(text_ids) < 2:
            text_ids = [rng.randrange(loaded.vocab_size) for _ in range(_RANDOM_TEXT_TOKENS)]
            notes.append("perplexity is that of random tokens: the tokenizer encodes no text")
    else:
        text_ids = _encode(loaded, f"--text {text_file}", _read(text_file, "--text"))
        if len(text_ids) < 2:
            raise ConfigurationError(
                f"--text: {text_file} has {len(text_ids)} token; give at least two"
            )
    return Inputs(tuple(map(tuple, prompts)), tuple(text_ids), tuple(notes))


def default_prompts(
    tokenizer: Any, vocab_size: int, count: int, longest: int, rng: random.Random
) -> list[list[int]]:
    """Prompts that suit any vocabulary: sentences, and random ids of many lengths.

    Every fourth begins with the whole of the one before it, so that the prefix cache is used.
    """
    prompts: list[list[int]] = []
    for index in range(count):
        ids: list[int] = []
        if index % 2 == 0:
            try:
                ids = encode_prompt(
                    tokenizer, _TEXTS[index // 2 % len(_TEXTS)], vocab_size=vocab_size
                )
            except InvalidRequest:
                ids = []  # this vocabulary has no such text
        if not ids or len(ids) > longest:
            size = rng.randint(1, min(longest, _LONGEST_PROMPT))
            ids = [rng.randrange(vocab_size) for _ in range(size)]
        if index % 4 == 3:
            ids = (prompts[-1] + ids)[:longest]
        prompts.append(ids)
    return prompts


def text_windows(num_tokens: int, length: int) -> list[tuple[int, int, int]]:
    """Windows over a text that is longer than the context: ``(begin, end, first scored)``.

    Each token but the first is scored in exactly one window, and past the first window with at
    least half a window before it.
    """
    stride = max(1, length // 2)
    windows, begin, scored = [], 0, 1
    while True:
        end = min(begin + length, num_tokens)
        windows.append((begin, end, scored))
        if end == num_tokens:
            return windows
        begin, scored = begin + stride, end


def _read_prompts(loaded: LoadedModel, path: Path, longest: int) -> list[list[int]]:
    prompts: list[list[int]] = []
    for number, line in enumerate(_read(path, "--prompts").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        prompt: object = line
        if path.suffix == ".jsonl":
            try:
                prompt = json.loads(line)
            except ValueError as error:
                raise ConfigurationError(f"{where}: not JSON ({error})") from None
        ids = _encode(loaded, where, prompt)
        if len(ids) > longest:
            raise ConfigurationError(
                f"{where}: {len(ids)} tokens; allowed: at most {longest}, the model's context of "
                f"{loaded.max_model_len} less --max-tokens; shorten it or lower --max-tokens"
            )
        prompts.append(ids)
    if not prompts:
        raise ConfigurationError(f"--prompts: {path} has no prompts; give one per line")
    return prompts


def _encode(loaded: LoadedModel, where: str, prompt: object) -> list[int]:
    try:
        return encode_prompt(loaded.tokenizer, prompt, vocab_size=loaded.vocab_size)
    except InvalidRequest as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(f"{option}: cannot read {path}: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{option}: {path} is not UTF-8 (byte {error.start}); convert it"
        ) from None


def _default_text(loaded: LoadedModel) -> Sequence[int]:
    """An excerpt of what ``help()`` shows, which is part of CPython."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions cut it from a minimal Python
        return ()
    text = next((topics[name] for name in ("assignment", "for") if name in topics), "")
    try:
        return encode_prompt(
            loaded.tokenizer, text[:_TEXT_CHARACTERS], vocab_size=loaded.vocab_size
        )
    except InvalidRequest:
        return ()
