"""What ``bench spec`` asks for: documentation, an edit, and unpredictable text."""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import random
import re
from collections.abc import Callable, Iterator, Mapping

from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Speculation

from .bench_models import Models
from .speculation_options import SpeculationOptions

__all__ = ["documentation", "edits", "hot", "steered"]

_PROMPT = 48
_HOT = 3.0
_EDITED_CHARACTERS = 700
_EDIT_EVERY = 12
"""Words between two that are exchanged."""

_BIAS = 100.0

Requests = Callable[[Models, SpeculationOptions, str], Iterator[EngineRequest]]


def documentation(
    models: Models, options: SpeculationOptions, seed: str
) -> Iterator[EngineRequest]:
    """Requests to go on with pieces of the interpreter's documentation, greedily."""
    draw, passage = random.Random(seed), _passages(models)
    for number in _forever():
        chosen = SamplingOptions(
            max_tokens=_length(draw, options), temperature=0.0, ignore_eos=True
        )
        yield _request(number, passage(draw, _PROMPT), chosen)


def hot(models: Models, options: SpeculationOptions, seed: str) -> Iterator[EngineRequest]:
    """Sampling at a temperature so high that no drafter can predict the text."""
    draw, passage = random.Random(seed), _passages(models)
    for number in _forever():
        chosen = SamplingOptions(
            max_tokens=_length(draw, options), temperature=_HOT, ignore_eos=True
        )
        yield _request(number, passage(draw, _PROMPT), chosen)


def edits(models: Models, _: SpeculationOptions, seed: str) -> Iterator[EngineRequest]:
    """A text to be given again with every twelfth word exchanged.

    A small model cannot edit. So ``choice`` lets it say only the edited text: the request names
    this one text, and the model chooses among the tokens that spell it. The output is what a model
    that edits well would say. Drafts know nothing of it, and each is verified.
    """
    assert models.encode is not None
    draw = random.Random(seed)
    for number in _forever():
        text = _snippet(draw)
        chosen = SamplingOptions(max_tokens=1024, temperature=0.0, choice=(_edited(draw, text),))
        prompt = tuple(models.encode(f"{text}\n\nEdited:\n\n"))
        yield dataclasses.replace(
            _request(number, prompt, chosen), new_constraint=models.compile(chosen)
        )


def steered(models: Models, options: SpeculationOptions, seed: str) -> Iterator[EngineRequest]:
    """A random model is let say one token, by a bias that nothing outweighs.

    So the draft model, which has the same bias, is right as often as :class:`Spoiled` leaves it.
    """
    draw, vocab_size = random.Random(seed), models.target.vocab_size
    for number in _forever():
        token = draw.randrange(3, vocab_size - 1)
        chosen = SamplingOptions(
            max_tokens=_length(draw, options),
            temperature=0.0,
            ignore_eos=True,
            logit_bias={token: _BIAS},
            speculation=Speculation.AUTO,
        )
        prompt = tuple(draw.randrange(3, vocab_size) for _ in range(_PROMPT))
        yield _request(number, prompt, chosen)


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _length(draw: random.Random, options: SpeculationOptions) -> int:
    """Different ones, lest all end at the same time again and again."""
    return draw.randint(-(-options.tokens // 2), options.tokens + options.tokens // 2)


def _passages(models: Models) -> Callable[[random.Random, int], tuple[int, ...]]:
    encode, texts = models.encode, _texts()
    assert encode is not None

    def passage(draw: random.Random, length: int) -> tuple[int, ...]:
        while True:
            ids = encode(draw.choice(texts))
            if len(ids) >= length:
                begin = draw.randrange(len(ids) - length + 1)
                return tuple(ids[begin : begin + length])

    return passage


def _snippet(draw: random.Random) -> str:
    """Whole words of about as many characters as a choice may have, with room for longer ones."""
    text = draw.choice(_texts())
    begin = draw.randrange(max(1, len(text) - _EDITED_CHARACTERS))
    cut = text[begin : begin + _EDITED_CHARACTERS].encode("ascii", "ignore").decode()
    return cut[cut.find(" ") + 1 : cut.rfind(" ")]


def _edited(draw: random.Random, text: str) -> str:
    words = sorted(set(re.findall(r"[a-z]{4,8}", text)) or {"word"})
    count = 0

    def exchange(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return draw.choice(words) if count % _EDIT_EVERY == 0 else match[0]

    return re.sub(r"\w+", exchange, text)


def _request(number: int, prompt: tuple[int, ...], options: SamplingOptions) -> EngineRequest:
    return EngineRequest(
        id=f"r{number}",
        lane=Lane.NORMAL,
        tenant="bench",
        prompt_ids=prompt,
        options=options,
        seed=number,
        arrival=0.0,
    )


def _texts() -> list[str]:
    topics: Mapping[str, str] = pydoc_data.topics.topics
    return [text for _, text in sorted(topics.items()) if len(text) > 1500]
