"""Speculation changes when tokens come, and never which."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from model.drafting.speculating import BLOCK_SIZE, Oracle, Served, draft_model, serve
from model.families import VOCAB_SIZE, WINDOW, others_slow
from model.oracle.generate_alone import generate_alone

from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup, most_blocks_held
from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.drafting.drafters import Proposal
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Speculation

Loaded = Callable[[str], LoadedModel]

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
OUTPUT_TOKENS = 14


def _prompts() -> dict[str, tuple[int, ...]]:
    draw = random.Random(11)
    ids = [draw.randrange(3, VOCAB_SIZE - 1) for _ in range(60)]
    return {
        "one": (7,),
        "short": tuple(ids[:5]),
        "long": tuple(ids[: 2 * WINDOW + 3]),
        "shared": (*ids[:25], 11, 12, 13),
        "repeating": tuple(ids[:6] * 4),
    }


PROMPTS = _prompts()
GREEDY = SamplingOptions(temperature=0.0, max_tokens=OUTPUT_TOKENS)


def requests(
    options: SamplingOptions = GREEDY,
) -> dict[str, tuple[tuple[int, ...], SamplingOptions]]:
    return {name: (prompt, options) for name, prompt in PROMPTS.items()}


FEW = (30, 31, 32)
"""Random models do not repeat themselves; one that may say three words does."""


VARIED = ("llama", "qwen3", "mistral", "gpt_oss")
"""Families that say few words neither in a circle nor without any order."""


@pytest.fixture(scope="module")
def generated(oracle: Callable[[str], Any]) -> Callable[..., dict[str, tuple[int, ...]]]:
    """What transformers' ``generate`` gives for each prompt, of all tokens or of few."""
    made: dict[tuple[str, tuple[int, ...]], dict[str, tuple[int, ...]]] = {}

    def get(family: str, allowed: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
        if (family, allowed) not in made:
            model, others = oracle(family), sorted({*range(VOCAB_SIZE)} - {*allowed})
            made[family, allowed] = {
                name: generate_alone(
                    model, prompt, OUTPUT_TOKENS, suppress_tokens=others if allowed else None
                )
                for name, prompt in PROMPTS.items()
            }
        return made[family, allowed]

    return get


@pytest.fixture(scope="module")
def greedy(
    generated: Callable[..., dict[str, tuple[int, ...]]],
) -> Callable[[str], dict[str, tuple[int, ...]]]:
    return generated


def by_oracle(
    model: LoadedModel, outputs: dict[str, tuple[int, ...]], k: int, **how: Any
) -> Served:
    """With drafts that are right three times in four."""
    coming = {PROMPTS[name]: tokens for name, tokens in outputs.items()}
    return serve(
        model,
        how.pop("requests", requests()),
        speculation=SpeculationConfig(ngram=False, draft=True, length=k),
        drafter=Oracle(coming, 0.25, VOCAB_SIZE),
        **how,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_tokens_are_those_of_generate_for_every_length(
    loaded: Loaded, greedy: Callable[[str], dict[str, tuple[int, ...]]], family: str, k: int
) -> None:
    expected = greedy(family)
    served = by_oracle(loaded(family), expected, k)
    assert served.outputs == expected
    assert 0 < served.accepted < served.drafted


@pytest.mark.parametrize("family", others_slow(FAMILIES, ("llama", "gpt_oss", "deepseek_v3")))
@pytest.mark.parametrize("drafter", ["ngram", "memory", "draft", "own", "auto"])
def test_greedy_tokens_are_those_of_generate_for_every_drafter_and_length(
    loaded: Loaded,
    generated: Callable[..., dict[str, tuple[int, ...]]],
    family: str,
    drafter: str,
) -> None:
    """With a second model as draft model, which seldom agrees, and with its own, which must."""
    model, few = loaded(family), replace(GREEDY, allowed_token_ids=FEW)
    asked = {"all": (PROMPTS["repeating"], GREEDY)}
    asked |= {name: (PROMPTS[name], few) for name in ("short", "shared", "repeating")}
    expected = {**generated(family, FEW), "all": generated(family)["repeating"]}
    own = draft_model(model if drafter == "own" else loaded("qwen2"), model, 200)
    drafted: Counter[Speculation] = Counter()
    accepted: Counter[Speculation] = Counter()
    for k in (1, 3, 8):
        served = serve(
            model,
            asked,
            speculation=SpeculationConfig(
                ngram=drafter in ("ngram", "auto"),
                memory=drafter in ("memory", "auto"),
                draft=drafter not in ("ngram", "memory"),
                length=k,
            ),
            drafter=own,
            at_once=4,
        )
        assert served.outputs == {name: expected[name] for name in asked}, k
        assert served.drafted > 0, k
        assert served.stats is not None
        assert served.stats.speculation is not None
        for (source, _), count in served.stats.speculation.drafted.items():
            drafted[source] += count
        for (source, _), count in served.stats.speculation.accepted.items():
            accepted[source] += count
    if drafter == "own":
        assert accepted == drafted
        return
    sources = {
        "ngram": {Speculation.NGRAM},
        "memory": {Speculation.NGRAM},
        "draft": {Speculation.DRAFT},
        "auto": {Speculation.NGRAM, Speculation.DRAFT},
    }
    assert set(drafted) == sources[drafter]
    if family in VARIED or drafter == "draft":
        for source, count in drafted.items():
            assert 0 < accepted[source] < count


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_layers_with_a_window_give_up_what_left_it_beside_a_draft_model(
    loaded: Loaded, greedy: Callable[[str], dict[str, tuple[int, ...]]], family: str
) -> None:
    model, most = loaded(family), most_blocks_held(WINDOW, 8, BLOCK_SIZE)
    served = serve(
        model,
        requests(),
        speculation=SpeculationConfig(ngram=False, draft=True, length=4),
        drafter=draft_model(model, model, 200),
        chunk_size=8,
        # Room for the windows of two: what is not given up would be missed at once.
        more_kv_cache_groups=(KVCacheGroup(2 * most, WINDOW),),
    )
    assert served.outputs == greedy(family)
    assert served.accepted == served.drafted > 30


@pytest.mark.parametrize("how", ["starved", "chunked", "solo", "uncached"])
def test_tokens_stay_the_same_in_every_mode(
    loaded: Loaded, greedy: Callable[[str], dict[str, tuple[int, ...]]], how: str
) -> None:
    changes: dict[str, Any] = {
        "starved": {"num_blocks": 17},
        "chunked": {"chunk_size": 6, "max_batch_tokens": 12},
        "solo": {"max_sequences": 1},
        "uncached": {"prefix_cache": False},
    }[how]
    expected = greedy("llama")
    served = by_oracle(loaded("llama"), expected, 3, **changes)
    assert served.outputs == expected
    assert served.stats is not None
    assert bool(served.stats.preemptions) == (how == "starved")


SAMPLED = {
    "plain": SamplingOptions(temperature=1.0, max_tokens=OUTPUT_TOKENS),
    "filtered": SamplingOptions(temperature=0.8, top_k=20, top_p=0.9, max_tokens=OUTPUT_TOKENS),
    "min_p": SamplingOptions(temperature=1.3, min_p=0.1, max_tokens=OUTPUT_TOKENS),
    "penalties": SamplingOptions(
        temperature=0.7,
        repetition_penalty=1.4,
        frequency_penalty=0.8,
        presence_penalty=0.5,
        max_tokens=OUTPUT_TOKENS,
    ),
    "greedy penalties": SamplingOptions(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=OUTPUT_TOKENS
    ),
    "restricted": SamplingOptions(
        temperature=1.0,
        allowed_token_ids=tuple(range(3, 40)),
        banned_token_ids=(5, 6),
        logit_bias={7: 3.0, 9: -2.0},
        max_tokens=OUTPUT_TOKENS,
    ),
    "min_tokens": SamplingOptions(
        temperature=1.0,
        allowed_token_ids=tuple(range(30, 36)),
        stop_token_ids=(31, 33),
        min_tokens=6,
        max_tokens=OUTPUT_TOKENS,
    ),
    "stop": SamplingOptions(
        temperature=1.0, allowed_token_ids=tuple(range(30, 36)), stop_token_ids=(31,), max_tokens=40
    ),
    "logprobs": SamplingOptions(temperature=0.9, logprobs=3, max_tokens=OUTPUT_TOKENS),
}


@pytest.mark.parametrize("drafter", ["oracle", "draft", "auto"])
def test_every_option_gives_the_stream_it_gives_without_drafts(
    loaded: Loaded, drafter: str
) -> None:
    """All at once: the batch is mixed in options, drafters and lengths."""
    model = loaded("llama")
    asked = {
        f"{name}/{prompt}": (PROMPTS[prompt], options)
        for name, options in SAMPLED.items()
        for prompt in ("short", "repeating")
    }
    seeds = {id: 1000 + i for i, id in enumerate(asked)}
    plain = serve(model, asked, seeds=seeds)
    assert len(set(plain.outputs.values())) > len(SAMPLED)  # they do differ
    for k in (1, 3, 6):
        if drafter == "oracle":
            known = [_single_prompt(asked, plain.outputs, part) for part in ("short", "repeating")]
            served = serve(
                model,
                asked,
                seeds=seeds,
                speculation=SpeculationConfig(ngram=False, draft=True, length=k),
                drafter=Oracle({**known[0], **known[1]}, 0.2, VOCAB_SIZE),
            )
        else:
            served = serve(
                model,
                asked,
                seeds=seeds,
                speculation=SpeculationConfig(ngram=drafter == "auto", draft=True, length=k),
                drafter=draft_model(model, model, 200),
            )
            if drafter == "draft":  # its own draft draws what it draws; stops cut that short
                stopped = sum(len(plain.outputs[id]) < asked[id][1].max_tokens for id in asked)
                assert 0 <= served.drafted - served.accepted <= k * stopped
        assert served.outputs == plain.outputs
        assert served.accepted > 0
        for id in asked:
            assert _text(served, id) == _text(plain, id)
            found, expected = _logprobs(served, id), _logprobs(plain, id)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [i for i, _ in a.top] == [i for i, _ in b.top]


def _single_prompt(asked: Any, outputs: Any, part: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {PROMPTS[part]: outputs[f"plain/{part}"]}


def _text(served: Served, id: str) -> str:
    return "".join(update.text for update in served.updates[id])


def _logprobs(served: Served, id: str) -> list[Any]:
    return [of for update in served.updates[id] for of in update.logprobs]


def test_a_stream_goes_on_elsewhere_with_other_drafts(loaded: Loaded) -> None:
    """A worker with drafts dies at any token; one without, or with others, continues the same."""
    model = loaded("llama")
    asked = {"a": (PROMPTS["short"], SAMPLED["filtered"])}
    whole = serve(model, asked, seeds={"a": 5}).outputs["a"]
    for count in range(1, len(whole)):
        served = serve(
            model,
            asked,
            seeds={"a": 5},
            begun={"a": whole[:count]},
            speculation=SpeculationConfig(memory=True, draft=True, length=1 + count % 5),
            drafter=draft_model(model, model, 200),
        )
        assert served.outputs["a"] == whole


@pytest.mark.parametrize("k", [1, 4])
def test_several_outputs_are_those_without_drafts(loaded: Loaded, k: int) -> None:
    """Choices share the blocks of their prompt; beams have no drafts."""
    model = loaded("llama")
    few = replace(SAMPLED["plain"], allowed_token_ids=(30, 31, 32), max_tokens=20)
    asked = {
        "choices": (PROMPTS["long"], replace(few, n=3)),
        "best": (PROMPTS["short"], replace(few, n=2, best_of=4, stop_token_ids=(32,))),
        "beams": (PROMPTS["short"], SamplingOptions(temperature=0.0, beam_width=3, max_tokens=9)),
        "one": (PROMPTS["repeating"], few),
    }
    plain = serve(model, asked, max_sequences=16)
    served = serve(
        model,
        asked,
        speculation=SpeculationConfig(memory=True, draft=True, length=k),
        drafter=draft_model(model, model, 200),
        max_sequences=16,
    )
    assert served.accepted > 0
    for id in asked:
        assert by_choice(served, id) == by_choice(plain, id)


def by_choice(served: Served, id: str) -> dict[int, tuple[tuple[int, ...], str]]:
    whole: dict[int, tuple[tuple[int, ...], str]] = {}
    for update in served.updates[id]:
        ids, text = whole.get(update.choice, ((), ""))
        whole[update.choice] = (ids + update.token_ids, text + update.text)
    return whole


@pytest.mark.parametrize("wish", Speculation)
def test_a_request_says_where_its_drafts_come_from(loaded: Loaded, wish: Speculation) -> None:
    model = loaded("llama")
    options = replace(GREEDY, speculation=wish)
    few = replace(options, allowed_token_ids=(30, 31, 32))
    served = serve(
        model,
        {"a": (PROMPTS["repeating"], options), "b": (PROMPTS["short"], few)},
        speculation=SpeculationConfig(ngram=True, draft=True, length=2),
        drafter=draft_model(model, model, 200),
    )
    assert served.stats is not None
    assert served.stats.speculation is not None
    sources = {source for source, _ in served.stats.speculation.drafted}
    both = {Speculation.NGRAM, Speculation.DRAFT}
    assert sources <= {Speculation.AUTO: both, Speculation.OFF: set()}.get(wish, {wish})
    assert bool(served.drafted) == (wish is not Speculation.OFF)


class Always(Oracle):
    """Proposes one token again and again."""

    def __init__(self, token_id: int) -> None:
        super().__init__({}, 0.0, VOCAB_SIZE)
        self._token_id = token_id

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        return [Proposal((self._token_id,) * span.num_drafts) for span in spans]


def test_a_threshold_takes_likely_drafts_and_no_forbidden_ones(loaded: Loaded) -> None:
    model = loaded("llama")
    coin = SamplingOptions(temperature=10.0, allowed_token_ids=(30, 31), max_tokens=40)

    def flip(threshold: float, draft: int) -> Served:
        return serve(
            model,
            {"a": (PROMPTS["short"], replace(coin, accept_threshold=threshold))},
            speculation=SpeculationConfig(ngram=False, draft=True, length=4),
            drafter=Always(draft),
        )

    plain = serve(model, {"a": (PROMPTS["short"], coin)})
    exact, typical, forbidden = flip(0.0, 31), flip(0.1, 31), flip(0.1, 32)
    assert exact.outputs == plain.outputs
    assert 0 < exact.accepted < exact.drafted
    assert typical.accepted == typical.drafted
    assert typical.outputs != plain.outputs
    assert forbidden.accepted == 0
    assert forbidden.outputs == plain.outputs
