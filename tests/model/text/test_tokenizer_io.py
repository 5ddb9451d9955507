from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from penstock.gpu_worker.model.text.prompt_tokenizer import encode_prompt
from penstock.shared.errors import InvalidRequest

TEMPLATE = """
{%- for message in messages -%}
{%- if message.role not in ["user", "assistant"] -%}
{{- raise_exception("unknown role " + message.role) -}}
{%- endif -%}
<s>{{ message.role[0] }}:{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<s>a:{%- endif -%}
"""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes and two special tokens; text gets a begin token."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_text_gets_the_tokenizers_special_tokens(tokenizer):
    ids = encode_prompt(tokenizer, "Hé")
    assert ids[0] == 0
    assert len(ids) == 1 + 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hé"


def test_special_tokens_may_be_the_whole_prompt(tokenizer):
    assert encode_prompt(tokenizer, "<s>") == [0, 0]


def test_a_prompt_longer_than_the_tokenizers_length_is_not_cut(tokenizer, caplog):
    tokenizer.model_max_length = 8
    assert len(encode_prompt(tokenizer, "a" * 50)) == 51
    assert not caplog.records


def test_ids_are_taken_as_they_are(tokenizer):
    assert encode_prompt(tokenizer, (5, 1, 257)) == [5, 1, 257]
    assert encode_prompt(tokenizer, [299], vocab_size=300) == [299]


@pytest.mark.parametrize("bad", [258, -1, True, 3.0, "5", None])
def test_a_bad_id_is_named_with_its_position(tokenizer, bad):
    with pytest.raises(InvalidRequest, match=r"^prompt\[2\]: .* from 0 to 257") as caught:
        encode_prompt(tokenizer, [1, 2, bad, 4])
    assert caught.value.field == "prompt[2]"


def test_a_word_the_model_has_no_embedding_for_is_named(tokenizer):
    tokenizer.add_tokens(["<new>"])
    assert encode_prompt(tokenizer, "a <new>", vocab_size=259)[-1] == 258
    with pytest.raises(InvalidRequest, match="without '<new>', which this model has no embedding"):
        encode_prompt(tokenizer, "a <new>", vocab_size=258)


@pytest.mark.parametrize("empty", [[], (), ""])
def test_a_prompt_without_tokens_is_refused(tokenizer, empty):
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    with pytest.raises(InvalidRequest, match="at least one token"):
        encode_prompt(tokenizer, empty)


@pytest.mark.parametrize("bad", [None, 7, b"bytes", {"role": "user", "content": "x"}])
def test_other_forms_are_refused(tokenizer, bad):
    with pytest.raises(InvalidRequest, match="text, token ids or chat messages"):
        encode_prompt(tokenizer, bad)


def test_text_without_a_utf8_form_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="UTF-8"):
        encode_prompt(tokenizer, "a\ud800b")


def test_chat_messages_are_rendered_up_to_the_answer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"})
    ids = encode_prompt(tokenizer, messages)
    assert tokenizer.decode(ids) == "<s>u:Hi<s>a:Yes<s>a:"
    assert all(isinstance(token_id, int) for token_id in ids)


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(InvalidRequest, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (TEMPLATE, "unknown role system"),
        ("{{ messages[3].content + 1 }}", "undefined|no element"),
        ("{% for %}", "Expected|expected"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_that_raises_is_the_requests_fault(tokenizer, template, says):
    tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=says) as caught:
        encode_prompt(tokenizer, [{"role": "system", "content": "Be kind."}])
    assert "\n" not in str(caught.value)
