from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.gpu_worker.model.text.byte_level_detokenizer import (
    ByteLevelDetokenizer,
    byte_level_words,
)
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.gpu_worker.model.text.token_bytes import token_bytes

BEYOND = 3
"""Ids that the model's logits have and the vocabulary does not."""


def every_byte(decoder: object) -> PreTrainedTokenizerFast:
    """A token for each byte, some of several, special ones, and added ones of all kinds of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ã", "©"), ("â", "Ĥ"), ("âĤ", "¬"), ("ð", "Ł")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    library = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    library.decoder = decoder
    library.add_special_tokens(["<s>"])
    library.add_tokens(
        [AddedToken(text, normalized=False) for text in ("two words", "é", "日本", "<tool>")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>")


TOKENIZER = every_byte(decoders.ByteLevel())
SIZE = len(TOKENIZER) + BEYOND


def words_of(tokenizer: PreTrainedTokenizerFast) -> tuple[bytes, ...] | None:
    return byte_level_words(tokenizer, token_bytes(tokenizer, len(tokenizer) + BEYOND))


WORDS = words_of(TOKENIZER) or ()


def ids_of(data: bytes) -> list[int]:
    return [WORDS.index(bytes((byte,))) for byte in data]


def joined(stream: ByteLevelDetokenizer | IncrementalDetokenizer, output: list[int]) -> str:
    return "".join(map(stream.feed, output)) + stream.flush() + stream.flush()


PIECES = st.one_of(
    st.lists(st.integers(0, SIZE - 1), max_size=4),
    st.text(max_size=3).map(lambda text: ids_of(text.encode("utf-8", "surrogatepass"))),
    st.sampled_from([ids_of(data) for data in (b"\xf0\x9f", b"\xe2\x82", b"\xff", b"\x80")]),
)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(PIECES, max_size=8), cut=st.integers(0, 30))
@example(parts=[ids_of(b"\xf0\x9f\x92x")], cut=2)
@example(parts=[ids_of("\ufffd".encode())], cut=2)
def test_the_text_is_that_of_the_window(parts: list[list[int]], cut: int) -> None:
    ids = [token_id for part in parts for token_id in part]
    prompt, output = ids[:cut], ids[cut:]
    # Of several U+FFFD at a prompt's end, the window gives those before the last again.
    assume(not TOKENIZER.decode(prompt).endswith("\ufffd\ufffd"))
    expected = joined(IncrementalDetokenizer(TOKENIZER, prompt), output)
    assert joined(ByteLevelDetokenizer(WORDS, prompt), output) == expected


def test_a_piece_comes_with_the_token_that_makes_it_certain() -> None:
    stream = ByteLevelDetokenizer(WORDS, ids_of(b"a"))
    fed = [stream.feed(token_id) for token_id in ids_of("é€x".encode() + b"\xffy\xe2")]
    assert fed == ["", "é", "", "", "€", "x", "\ufffd", "y", ""]
    assert [stream.flush(), stream.flush()] == ["\ufffd", ""]


def test_what_the_prompt_left_incomplete_comes_whole_or_not_at_all() -> None:
    whole = ids_of("🦭".encode())
    for cut in range(1, len(whole)):
        assert joined(ByteLevelDetokenizer(WORDS, whole[:cut]), whole[cut:]) == "🦭"
        assert joined(ByteLevelDetokenizer(WORDS, whole[:cut]), ids_of(b"a")) == "a"
        assert joined(ByteLevelDetokenizer(WORDS, whole[:cut]), []) == ""


@pytest.mark.parametrize(
    "decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()]), decoders.Fuse()]
)
def test_other_decoders_have_no_table(decoder: object) -> None:
    assert words_of(every_byte(decoder)) is None


def test_a_tokenizer_that_decodes_its_own_way_has_no_table() -> None:
    class Own(PreTrainedTokenizerFast):
        def _decode(self, token_ids, **how):  # type: ignore[no-untyped-def]
            return super()._decode(token_ids, **how).upper()

    assert words_of(Own(tokenizer_object=TOKENIZER.backend_tokenizer)) is None
