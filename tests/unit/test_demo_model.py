"""The shipped demo model: size, loading, text, figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "gpu_worker" / "demo_model"
NAMES = ("target", "draft")

# Measured on the shipped weights, here with a margin for other CPUs' rounding.
TARGET_LIMIT = 45.0  # perplexity of HELD_OUT is 38.6
DRAFT_LIMIT = 58.0  # 50.0
AGREEMENT_LIMIT = 0.58  # 0.657 of the greedy tokens after PROMPTS
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")


# Two docstrings of the held-out part, as they are in CPython 3.11.
HELD_OUT = """\
class _pydecimal.Clamped(DecimalException)

Exponent of a 0 changed to fit bounds.

This occurs and signals clamped if the exponent of a result has been
altered in order to fit the constraints of a specific concrete
representation.  This may occur when the exponent of a zero result would
be outside the bounds of a representation, or when a large normal
number would have an encoded exponent that cannot be represented.  In
this latter case, the exponent is reduced to fit and the corresponding
number of zero digits are appended to the coefficient ("fold-down").


zip

zip(*iterables, strict=False) --> Yield tuples until an input is exhausted.

   >>> list(zip('abcdefg', range(3), range(4)))
   [('a', 0, 0), ('b', 1, 1), ('c', 2, 2)]

The zip object yields n-length tuples, where n is the number of iterables
passed as positional arguments to zip().  The i-th element in every tuple
comes from the i-th iterable argument to zip().  This continues until the
shortest argument is exhausted.

If strict is true and one of the arguments is exhausted before the others,
raise a ValueError.
"""
# Ordinary text to fill a context with.
FILLER = """\
textwrap.wrap(text, width=70, **kwargs)

Wrap a single paragraph of text, returning a list of wrapped lines.

Reformat the single paragraph in 'text' so it fits in lines of no more than 'width' columns, and
return a list of wrapped lines.  By default, tabs in 'text' are expanded with string.expandtabs(),
and all other whitespace characters (including newline) are converted to space.
"""
PROMPTS = (
    "The assert statement",
    "Return a list of the words in the string, using",
    "A generator function is",
    "Raises ValueError if",
    "class Thread(object)\n\n",
    "This module provides",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {
        name: AutoModelForCausalLM.from_pretrained(
            DEMO / name, local_files_only=True, dtype=torch.float32
        ).eval()
        for name in NAMES
    }


def greedy(model: Any, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    full: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens
    )
    return full


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def perplexity(model: Any, ids: torch.Tensor, start: int = 0) -> float:
    """Per token of ``ids`` [1, length], over predictions made from position ``start`` on."""
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, start:]
    return math.exp(float(torch.nn.functional.cross_entropy(logits, ids[0, 1 + start :])))


# --- the files -----------------------------------------------------------------------------


def test_both_models_together_are_under_15_megabytes() -> None:
    assert sum(f.stat().st_size for f in DEMO.rglob("*") if f.is_file()) < 15_000_000


def test_only_the_documented_files_are_shipped_and_anyone_may_read_them() -> None:
    shipped = {f.relative_to(DEMO).as_posix() for f in DEMO.rglob("*") if f.is_file()}
    files = (
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    assert shipped == {"README.md", *(f"{name}/{file}" for name in NAMES for file in files)}
    assert all(f.stat().st_mode & 0o444 == 0o444 for f in DEMO.rglob("*") if f.is_file())


def test_target_and_draft_share_one_tokenizer_to_the_byte() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (DEMO / "target" / file).read_bytes() == (DEMO / "draft" / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_and_the_head_is_tied(name: str) -> None:
    with safe_open(DEMO / name / "model.safetensors", framework="pt") as weights:
        dtypes = {weights.get_tensor(key).dtype for key in weights.keys()}  # noqa: SIM118
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_configuration_names_the_tokens_that_end_a_text(name: str, tokenizer: Any) -> None:
    for file in ("config.json", "generation_config.json"):
        config = json.loads((DEMO / name / file).read_text())
        assert config["eos_token_id"] == tokenizer.eos_token_id
        assert config["pad_token_id"] == tokenizer.pad_token_id
        assert config["bos_token_id"] == tokenizer.bos_token_id


def test_shapes(models: dict[str, Any]) -> None:
    target, draft = models["target"], models["draft"]
    assert target.config.model_type == draft.config.model_type == "llama"
    assert 5_000_000 < target.num_parameters() < 6_000_000
    assert target.config.num_hidden_layers == 12
    assert draft.config.num_hidden_layers == 2
    assert target.config.num_key_value_heads < target.config.num_attention_heads
    assert target.config.vocab_size == draft.config.vocab_size == 4096
    assert target.config.max_position_embeddings == draft.config.max_position_embeddings == 2048


def test_the_card_states_the_agreement_and_perplexity_of_these_weights() -> None:
    card = (DEMO / "README.md").read_text()
    assert re.search(r"^\| target \| \d+\.\d\d \| \d\.\d\d\d \|", card, re.MULTILINE)
    assert re.search(r"^\| held-out text \| \d\d\.\d% \|", card, re.MULTILINE)


# --- the tokenizer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n\n",
        "\ufeffa\x00b\x7f",
        "line\r\nline\r\n\ttab  two   three ",
        "👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u00e9 \u202eabc",
        "def f(x: int) -> str:\n    return f'{x!r:>10}'  # naïve\n",
        " isn't . , ! ? ' s",
        "日本語のテキスト \U0001f600\U0010ffff",
    ],
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text().filter(lambda text: not any(name in text for name in SPECIAL)))
def test_any_other_text_round_trips_and_gives_no_special_token(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "user", " ", "x", "é"])).map("".join))
def test_special_tokens_of_untrusted_text_can_be_split(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_nothing_is_added_to_a_prompt(tokenizer: Any) -> None:
    assert tokenizer("x").input_ids == tokenizer("x", add_special_tokens=False).input_ids
    assert len(tokenizer("x").input_ids) == 1


def test_special_tokens_are_the_first_ids(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(range(6)) == list(SPECIAL)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == SPECIAL[:3]
    assert len(tokenizer) == 4096


def test_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V\n"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ("<|bos|><|system|>S<|user|>U<|assistant|>A<|eos|><|user|>V\n<|assistant|>")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(rendered).input_ids


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role wizard: use system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": ""}], tokenize=False)


# --- the text ------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_english_and_no_single_token_loop(
    models: dict[str, Any], tokenizer: Any, prompt: str
) -> None:
    ids = encode(tokenizer, prompt)
    made = greedy(models["target"], ids, 60)[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(made, skip_special_tokens=True)
    words = set(re.findall(r"[a-z]+", text.lower()))
    assert words & {"the", "a", "is", "of", "to", "in", "and", "for", "this"}, text
    assert "\ufffd" not in text, text
    assert len(set(made)) >= min(10, len(made)), text


def test_a_short_question_gets_an_answer_that_ends(models: dict[str, Any], tokenizer: Any) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What does textwrap.wrap do?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    ids = inputs["input_ids"]
    made = greedy(models["target"], ids, 400)[0, ids.shape[1] :].tolist()
    assert made[-1] == tokenizer.eos_token_id
    assert len(made) > 5


def test_perplexity_of_held_out_text(models: dict[str, Any], tokenizer: Any) -> None:
    ids = encode(tokenizer, HELD_OUT)
    target, draft = (perplexity(models[name], ids) for name in NAMES)
    assert target < TARGET_LIMIT
    assert target < draft < DRAFT_LIMIT


def test_the_whole_context_is_usable(models: dict[str, Any], tokenizer: Any) -> None:
    """At the end of a full context, held-out text is predicted no worse than in a short one."""
    filler = encode(tokenizer, "\n\n\n".join([FILLER] * 40))
    held_out = encode(tokenizer, HELD_OUT)
    length = models["target"].config.max_position_embeddings
    start = length - held_out.shape[1]
    ids = torch.cat([filler[:, :start], held_out], dim=1)
    for name in NAMES:
        late = perplexity(models[name], ids, start=start)
        assert late < 1.25 * perplexity(models[name], held_out)


def test_the_draft_often_proposes_what_the_target_chooses(
    models: dict[str, Any], tokenizer: Any
) -> None:
    equal = total = 0
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt)
        full = greedy(models["target"], ids, 60)
        with torch.inference_mode():
            proposed = models["draft"](input_ids=full[:, :-1]).logits.argmax(-1)
        start = ids.shape[1]
        equal += int((proposed[0, start - 1 :] == full[0, start:]).sum())
        total += full.shape[1] - start
    assert equal / total > AGREEMENT_LIMIT
