"""Structured output: always of its form, and a function of the ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model.engine_run import Answer, Bench, compiler_of

from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.structured import constraint_compiler as compiler_module
from penstock.gpu_worker.model.structured.constraint_compiler import ConstraintCompiler
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

Loaded = Callable[[str], LoadedModel]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "[a-f]{3,9}-[0-9]{2}(é|😀)?"
CHOICES = ["yes", "no", "maybe not", 'a "quoted"\n one\\', "y"]
GRAMMAR = 'start: "(" start? ")" | "[" /[0-9]{1,4}/ "]"'
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": REGEX},
    {"choice": CHOICES},
    {"grammar": GRAMMAR},
]
PLAIN: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 25, "repetition_penalty": 1.4, "temperature": 0.8},
    {"max_tokens": 30, "temperature": 0},
    {"max_tokens": 20, "top_p": 0.9, "min_tokens": 10, "banned_token_ids": [5, 6]},
]


def is_of_form(options: dict[str, Any], text: str) -> bool:
    """The definition once more, by other means than the library's."""
    if "json_schema" in options:
        value = json.loads(text)
        tags = value.pop("tags", [])
        return (
            set(value) == {"name", "age"}
            and isinstance(value["name"], str)
            and len(value["name"]) <= 8
            and type(value["age"]) is int
            and 0 <= value["age"] <= 150
            and len(tags) <= 3
            and set(tags) <= {"a", "b"}
        )
    if "regex" in options:
        return re.fullmatch(options["regex"], text) is not None
    if "choice" in options:
        return text in options["choice"]
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return text == "" or re.fullmatch(r"\[[0-9]{1,4}\]", text) is not None


@pytest.fixture(scope="module")
def demo() -> Iterator[LoadedModel]:
    model = load_model("demo", device="cpu")
    yield model
    model.close()


@pytest.fixture
def tiny(loaded: Loaded) -> LoadedModel:
    return loaded("llama")


def ended(answer: Answer) -> Reason:
    assert answer.finish is not None
    return answer.finish.reason


# --- always of the form ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["demo", "llama", "gemma2", "qwen3"])
def test_outputs_always_have_their_form(family: str, loaded: Loaded, demo: LoadedModel) -> None:
    model = demo if family == "demo" else loaded(family)
    bench = Bench(model)
    asked: dict[str, dict[str, Any]] = {}
    for seed in range(12):
        for number, form in enumerate(FORMS):
            # Random models never tire of brackets: what is cut off is of no form.
            options = {**form, "max_tokens": 200}
            if seed % 3 == 1:
                options |= {"top_p": 0.9, "repetition_penalty": 1.2}
            if seed % 3 == 2:
                options |= {"logprobs": 2, "top_k": 50}
            asked[f"{number}.{seed}"] = options
            bench.add(f"{number}.{seed}", [5, 6, 7], seed=seed, **options)
    complete = 0
    for id, answer in bench.run().items():
        if ended(answer) is Reason.LENGTH:
            continue
        assert ended(answer) is Reason.STOP, answer
        assert is_of_form(asked[id], answer.text), (asked[id], answer.text)
        assert answer.token_ids[-1] in model.eos_token_ids
        complete += 1
    assert complete >= 40


def test_what_is_cut_off_is_the_beginning_of_a_text_of_the_form(tiny: LoadedModel) -> None:
    bench = Bench(tiny)
    bench.add("a", [5], max_tokens=2, regex="abcdefghijklmnopq{20}")
    answer = bench.run()["a"]
    assert ended(answer) is Reason.LENGTH
    assert "abcdefghijklmnop".startswith(answer.text)
    assert answer.text


def test_stop_tokens_may_end_it_where_it_may_end(tiny: LoadedModel) -> None:
    (full_stop,) = tiny.tokenizer.encode(".", add_special_tokens=False)
    bench = Bench(tiny)
    bias = {next(iter(tiny.eos_token_ids)): -100}
    bench.add("a", [5], regex="[xy]{2}", stop_token_ids=[full_stop], logit_bias=bias)
    answer = bench.run()["a"]
    assert ended(answer) is Reason.STOP
    assert answer.token_ids[-1] == full_stop
    assert re.fullmatch("[xy]{2}", answer.text)


def test_options_that_leave_no_token_end_the_request_by_name(tiny: LoadedModel) -> None:
    bench = Bench(tiny)
    bench.add("a", [5], choice=["ab"], min_tokens=9)
    bench.add("b", [5], regex="[0-9]+", allowed_token_ids=tiny.tokenizer.encode("x"))
    bench.add("c", [5], max_tokens=9, ignore_eos=True)
    answers = bench.run()
    assert answers["a"].text == "ab"
    for id, fields in (("a", "choice, min_tokens: "), ("b", "regex, allowed_token_ids: ")):
        assert ended(answers[id]) is Reason.INVALID
        assert answers[id].finish.message.startswith(fields)
    assert len(answers["c"].token_ids) == 9


# --- a function of the ids ------------------------------------------------------------------------


def alone(model: LoadedModel, seed: int, options: dict[str, Any]) -> list[int]:
    bench = Bench(model)
    bench.add("a", [5, 6, 7 + seed], seed=seed, **options)
    return bench.run()["a"].token_ids


def test_mixed_batches_change_neither_these_rows_nor_the_others(tiny: LoadedModel) -> None:
    options = [*FORMS, *PLAIN]
    bench = Bench(tiny)
    for seed, chosen in enumerate(options):
        bench.add(str(seed), [5, 6, 7 + seed], seed=seed, **chosen)
    for seed, chosen in enumerate(options):
        assert alone(tiny, seed, chosen) == bench.run()[str(seed)].token_ids


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_continued_anywhere_it_gives_the_same_tokens(
    tiny: LoadedModel, form: dict[str, Any]
) -> None:
    whole = alone(tiny, 3, form)
    bench = Bench(tiny)
    for cut in range(len(whole)):
        bench.add(str(cut), [5, 6, 10], seed=3, output_ids=whole[:cut], **form)
    for cut in range(len(whole)):
        assert bench.run()[str(cut)].token_ids == whole[cut:]


def test_preempted_work_goes_on_in_mid_value(tiny: LoadedModel) -> None:
    expected = [alone(tiny, seed, FORMS[seed % 3]) for seed in range(6)]
    bench = Bench(tiny, num_blocks=16, max_sequences=6, prefix_cache=False)
    for seed in range(6):
        lane = (Lane.BATCH, Lane.NORMAL)[seed % 2]
        bench.add(str(seed), [5, 6, 7 + seed], seed=seed, lane=lane, **FORMS[seed % 3])
    answers = bench.run()
    assert sum(bench.engine.stats().preemptions.values()) > 0
    assert [answers[str(seed)].token_ids for seed in range(6)] == expected


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 4}], ids=str)
def test_each_of_several_choices_follows_the_form_by_itself(
    tiny: LoadedModel, options: dict[str, int]
) -> None:
    bench = Bench(tiny)
    bench.add("a", [5, 6, 7], seed=3, **FORMS[1], **options)
    texts = [""] * options["n"]
    for update in bench.run()["a"].updates:
        texts[update.choice] += update.text
    assert len(set(texts)) > 1
    assert all(is_of_form(FORMS[1], text) for text in texts)


def test_ids_that_do_not_follow_end_the_request(tiny: LoadedModel) -> None:
    bench = Bench(tiny)
    bench.add("a", [5], output_ids=tiny.tokenizer.encode("yellow"), choice=["yes", "no"])
    answer = bench.run()["a"]
    assert ended(answer) is Reason.INVALID
    assert answer.finish.message.startswith("choice: ")


def test_drafts_are_allowed_as_far_as_they_follow(tiny: LoadedModel) -> None:
    compiler = compiler_of(tiny)
    state = compiler.compile(SamplingOptions(regex="[a-c]*!"))().state
    a, b, x, end = (tiny.tokenizer.encode(c)[0] for c in "abx!")
    state.fill([a])
    before = state.masks(1)[0].clone()
    assert state.allowed_prefix([b, a, x, a]) == 2
    assert state.allowed_prefix([x]) == 0
    assert state.allowed_prefix([a, end]) == 2
    state.fill([])
    assert torch.equal(state.masks(1)[0], before)


# --- compiled, or refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"type": "nope"}},
        {"json_schema": {"not": {"type": "string"}}},
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$ref": "https://example.com/schema"}},
        {"regex": "("},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)b"},
        {"regex": r"[^\s\S]"},
        {"regex": "(a|b)?" * 1300},
        {"grammar": "start: nothing"},
        {"grammar": "hello"},
        {"grammar": 'start: start "a"'},
    ],
    ids=lambda options: str(options)[:50],
)
def test_what_is_no_form_is_refused_by_name(demo: LoadedModel, options: dict[str, Any]) -> None:
    compiler = compiler_of(demo)
    (field,) = options
    with pytest.raises(InvalidRequest, match=rf"^{field}: got .*it says: \S"):
        compiler.compile(SamplingOptions(**options))


def test_a_schema_nested_deeper_than_a_parser_reads_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(InvalidRequest, match=r"^json_schema: got .* it is nested too deeply"):
        SamplingOptions(json_schema='{"items":' * 900 + "{}" + "}" * 900)


def test_a_model_that_cannot_end_is_refused_a_form(tiny: LoadedModel) -> None:
    compiler = ConstraintCompiler(tiny.tokenizer, tiny.vocab_size, frozenset())
    with pytest.raises(InvalidRequest, match=r"^regex: .* no end-of-text token"):
        compiler.compile(SamplingOptions(regex="a"))
    assert compiler.compile(SamplingOptions(regex="a", stop_token_ids=[9])) is not None


def test_equal_forms_are_compiled_once_and_few_are_kept(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_KEPT", 3)
    compiler = ConstraintCompiler(tiny.tokenizer, tiny.vocab_size, tiny.eos_token_ids)

    def template(regex: str, **options: Any) -> Any:
        compiled = compiler.compile(SamplingOptions(regex=regex, **options))
        assert compiled is not None
        return compiled.template

    first = template("a")
    assert template("a", temperature=0.5, stop_token_ids=[4]) is first
    for other in ("b", "c", "a", "d"):
        template(other)
    assert template("a") is first
    for other in ("e", "f", "g"):
        template(other)
    assert template("a") is not first
    assert compiler.compile(SamplingOptions()) is None
