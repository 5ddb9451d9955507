from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.gpu_worker.model.text.fast_detokenize import decoder_of

REPLACEMENT = "\ufffd"

CORPUS = [
    "Hello World, this is a penstock. The water runs through the pipe; it's fast.\r\n",
    "naïve café, Größe, façade, smörgåsbord",
    "日本語のテキスト 你好世界 안녕하세요 привет мир שלום",
    "👩‍👩‍👧‍👦 🎉🎉 👍🏽 e\u0301 n\u0303 🇩🇪",
    "def f(x):\n    return x  #  two  spaces\n\n\n",
]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen: merges cross the bytes of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token=None
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma: words with a leading mark, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!é日本"))
    merged = ["▁H", "el", "lo", "▁Hel", "▁Hello", "▁W", "or", "ld", "▁▁"]
    merges = [("▁", "H"), ("e", "l"), ("l", "o"), ("▁H", "el"), ("▁Hel", "lo"), ("▁", "W")]
    merges += [("o", "r"), ("l", "d"), ("▁", "▁")]
    words = {word: i for i, word in enumerate([*pieces, *letters, *merged])}
    tokenizer = Tokenizer(
        models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def metaspace() -> PreTrainedTokenizerFast:
    """A SentencePiece unigram vocabulary without bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>"
    )
    trainer.show_progress = False
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


BYTE_LEVEL, BYTE_FALLBACK, METASPACE = byte_level(), byte_fallback(), metaspace()
ALL = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE], ids=["byte_level", "fallback", "metaspace"]
)


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt)
    return [*(stream.feed(token_id) for token_id in output), stream.flush()]


def continuation(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> str:
    """What the output adds; the prompt must end with a whole character."""
    whole, begin = decode(tokenizer, prompt + output), decode(tokenizer, prompt)
    assert whole.startswith(begin)
    return whole[len(begin) :]


TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("aé€日本👍🏽\u0301\u200d\r\n\t  🎉🇩🇪\ufffd"),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 200))
@example(text="👩‍👩‍👧‍👦 e\u0301\r\n\r\n 你好", cut=0)
@example(text="\ufffd\ufffd\ufffd\ufffd\ufffd", cut=3)
@example(text=" two  spaces   after ", cut=4)
@pytest.mark.parametrize("name", ["byte_level", "fallback"])
def test_pieces_join_to_the_text(name, text, cut):
    tokenizer = {"byte_level": BYTE_LEVEL, "fallback": BYTE_FALLBACK}[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, output = ids[:cut], ids[cut:]
    parts = pieces(tokenizer, prompt, output)
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in part for part in parts)
    if REPLACEMENT not in decode(tokenizer, prompt)[-3:]:
        assert "".join(parts) == continuation(tokenizer, prompt, output)
    else:  # a cut inside a character: the output brings it whole
        assert decode(tokenizer, ids).endswith("".join(parts))


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(" ".join(CORPUS).split()), max_size=30), cut=st.integers(0, 60)
)
def test_pieces_join_to_the_text_in_a_vocabulary_of_whole_words(words, cut):
    ids = METASPACE.encode(" ".join(words), add_special_tokens=False)
    prompt, output = ids[:cut], ids[cut:]
    parts = pieces(METASPACE, prompt, output)
    assert "".join(parts) == continuation(METASPACE, prompt, output)
    assert parts[-1] == ""


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) + 5), max_size=80), cut=st.integers(0, 40))
def test_random_ids_lose_nothing(ids, cut):
    """Invalid UTF-8, special tokens and ids past the vocabulary, byte-level."""
    prompt, output = ids[:cut], ids[cut:]
    joined = "".join(pieces(BYTE_LEVEL, prompt, output))
    whole, begin = decode(BYTE_LEVEL, prompt + output), decode(BYTE_LEVEL, prompt)
    if whole.startswith(begin):
        assert joined == whole[len(begin) :]
    else:  # the output completed the prompt's last character
        assert whole.endswith(joined)
        assert len(whole) - len(joined) < len(begin)


_BYTES = st.integers(3, 258)  # <0x00> to <0xFF>
_RUNS = st.lists(
    st.one_of(_BYTES, st.integers(259, len(BYTE_FALLBACK) - 1), st.sampled_from([3 + 0xE2])),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ids=_RUNS)
@example(ids=[315, 315])  # two bare spaces: only the first is the vocabulary's mark
def test_runs_of_random_byte_tokens_follow_the_unicode_standard(ids):
    joined = "".join(pieces(BYTE_FALLBACK, [], ids))
    expected, run = "", b""
    for token_id in [*ids, -1]:
        if 3 <= token_id <= 258:
            run += bytes([token_id - 3])
            continue
        expected += run.decode("utf-8", errors="replace")
        run = b""
        if token_id >= 0:
            expected += BYTE_FALLBACK.convert_ids_to_tokens(token_id).replace("▁", " ")
    # The text's first space is the vocabulary's mark, unless bytes come before it.
    assert joined == (
        expected[1:] if ids and expected.startswith(" ") and ids[0] > 258 else expected
    )


@ALL
def test_leading_spaces_depend_on_the_prompt(tokenizer):
    prompt = tokenizer.encode("Hello", add_special_tokens=False)
    output = tokenizer.encode("Hello World", add_special_tokens=False)[len(prompt) :]
    assert "".join(pieces(tokenizer, prompt, output)) == " World"
    alone = "".join(pieces(tokenizer, [], output))
    assert alone == decode(tokenizer, output)


@ALL
def test_special_tokens_at_the_prompts_end_do_not_eat_the_space(tokenizer):
    begin = tokenizer.bos_token_id
    prompt = [*tokenizer.encode("Hello", add_special_tokens=False), *[begin] * 50]
    output = tokenizer.encode("Hello World", add_special_tokens=False)[len(prompt) - 50 :]
    assert "".join(pieces(tokenizer, prompt, output)) == " World"


@ALL
def test_special_and_unknown_tokens_add_nothing(tokenizer):
    word = tokenizer.encode("Hello", add_special_tokens=False)
    noise = [tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer) + 7]
    parts = pieces(tokenizer, word, [*noise * 40, *word])
    assert set(parts[: len(noise) * 40]) == {""}
    assert "".join(parts) == continuation(tokenizer, word, word)


def seal(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens of one character of 4 bytes, at least 3 of them."""
    ids = [i for i in tokenizer.encode("🦭", add_special_tokens=False) if decode(tokenizer, [i])]
    assert len(ids) >= 3
    return ids


@pytest.mark.parametrize("name", ["byte_level", "fallback"])
def test_a_character_comes_whole_with_its_last_byte(name):
    tokenizer = {"byte_level": BYTE_LEVEL, "fallback": BYTE_FALLBACK}[name]
    ids = seal(tokenizer)
    assert pieces(tokenizer, [], ids) == [*[""] * (len(ids) - 1), "🦭", ""]
    for cut in range(1, len(ids)):  # begun by the prompt
        assert "".join(pieces(tokenizer, ids[:cut], ids[cut:])) == "🦭"


@pytest.mark.parametrize("name", ["byte_level", "fallback"])
def test_what_stays_incomplete_comes_out_at_the_end(name):
    tokenizer = {"byte_level": BYTE_LEVEL, "fallback": BYTE_FALLBACK}[name]
    letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
    ids = seal(tokenizer)
    assert pieces(tokenizer, letter, ids[:-1]) == [*[""] * (len(ids) - 1), REPLACEMENT]
    stream = IncrementalDetokenizer(tokenizer, letter)
    assert [stream.feed(i) for i in ids[:2]] == ["", ""]
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "fallback"])
def test_an_invalid_end_of_the_prompt_stays_the_prompts(name):
    tokenizer = {"byte_level": BYTE_LEVEL, "fallback": BYTE_FALLBACK}[name]
    letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
    half = seal(tokenizer)[:-1]
    assert "".join(pieces(tokenizer, letter + half, letter)) == "a"
    assert "".join(pieces(tokenizer, letter + half, [])) == ""


@ALL
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_replay_gives_the_same_pieces(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    cut = data.draw(st.integers(0, len(ids)))
    assert pieces(tokenizer, ids[:cut], ids[cut:]) == pieces(tokenizer, ids[:cut], ids[cut:])


class Counting:
    """A tokenizer that counts how many tokens it was asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (BYTE_LEVEL, BYTE_LEVEL.encode("Hello World, café 日本語 " * 400)),
        (BYTE_LEVEL, BYTE_LEVEL.convert_tokens_to_ids(["ÿ"] * 5000)),  # 0xFF: never valid
        (BYTE_LEVEL, [*BYTE_LEVEL.convert_tokens_to_ids(["â"]), *[0] * 5000]),
        (BYTE_FALLBACK, BYTE_FALLBACK.encode("Hello World, 🦭 " * 400)),
        (BYTE_FALLBACK, [3 + 0xFF] * 5000),
        (METASPACE, METASPACE.encode("the water runs " * 800)),
        (METASPACE, [0] * 5000),
    ],
    ids=["text", "invalid", "half", "fallback", "invalid bytes", "metaspace", "special"],
)
def test_work_per_token_is_bounded(tokenizer, ids):
    counting = Counting(tokenizer)
    stream = IncrementalDetokenizer(counting, ids[:1])
    for token_id in ids:
        stream.feed(token_id)
    assert len(ids) > 2000
    assert counting.decoded < 40 * len(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, METASPACE])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_librarys_decode_is_the_tokenizers(tokenizer, data):
    """Also for ids beyond the vocabulary, which models have that are wider than their words."""
    decoder = decoder_of(tokenizer)
    assert decoder is not tokenizer
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=24))
    how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert decoder.decode(ids, **how) == tokenizer.decode(ids, **how)


def test_a_tokenizer_that_decodes_its_own_way_is_left_alone():
    class Own(PreTrainedTokenizerFast):
        def _decode(self, token_ids, **how):
            return super()._decode(token_ids, **how).upper()

    tokenizer = Own(tokenizer_object=BYTE_LEVEL.backend_tokenizer)
    assert decoder_of(tokenizer) is tokenizer
    stream = IncrementalDetokenizer(decoder_of(tokenizer), [])
    ids = BYTE_LEVEL.encode("water")
    assert "".join(map(stream.feed, ids)) + stream.flush() == "WATER"


def test_text_of_a_long_output_costs_as_much_per_token_as_that_of_a_short_one():
    """Ids handed to the tokenizer per token, at the begin of an output of 20,000 and at its end."""
    counting = Counting(BYTE_LEVEL)
    stream = IncrementalDetokenizer(counting, [0])
    ids = BYTE_LEVEL.encode(CORPUS[0] * 500)[:20_000]
    decoded = []
    for index, token_id in enumerate(ids):
        stream.feed(token_id)
        if index % 2000 == 0:
            decoded.append(counting.decoded)
    shares = [after - before for before, after in itertools.pairwise(decoded)]
    assert max(shares[1:]) < 1.1 * min(shares[1:])
