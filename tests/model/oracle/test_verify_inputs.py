"""What `penstock verify` compares: ties and mismatches, windows of a text, prompts from files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.shared.errors import ConfigurationError
from penstock.tools.verify import greedy
from penstock.tools.verify.greedy import Greedy
from penstock.tools.verify.inputs import default_prompts, gather_inputs, text_windows

Checkpoint = Callable[[str], Path]


# --- ties and mismatches ------------------------------------------------------------------------


class FixedLogits:
    """A reference whose logits of the next token are always the same."""

    def __init__(self, *logits: float) -> None:
        self.row = torch.tensor([logits])

    def logits(self, token_ids: Any) -> torch.Tensor:
        return self.row.expand(len(token_ids), -1)


@pytest.mark.parametrize(
    ("ours", "counts"),
    [
        ([0, 1, 2], (3, 3, 0, 0)),
        ([0, 1, 3], (3, 2, 1, 0)),  # 2 and 3 are alike
        ([0, 3, 2], (3, 1, 0, 1)),  # 1 and 3 are not
        ([3, 1, 2], (3, 0, 0, 1)),
        ([0, 1], (3, 2, 0, 1)),  # ended early
    ],
)
def test_a_tie_is_told_from_a_mismatch_and_counts_as_neither(
    ours: list[int], counts: tuple[int, ...]
) -> None:
    result = Greedy([(9, 0, 1, 2)])
    reference: Any = FixedLogits(5.0, 7.0, 10.0, 10.0 - 5e-5)
    greedy._compare(result, reference, 0, 1, ours, [0, 1, 2])
    assert (result.compared, result.equal, result.tied, result.mismatched) == counts
    assert len(result.notes) == (counts[1] != 3)


def test_a_tie_in_the_middle_ends_the_comparison_of_its_prompt() -> None:
    result = Greedy([(9, 2, 1, 1)])
    reference: Any = FixedLogits(5.0, 7.0, 10.0, 10.0)
    greedy._compare(result, reference, 0, 1, [3, 0, 0], [2, 1, 1])
    assert (result.compared, result.equal, result.tied, result.mismatched) == (1, 0, 1, 0)
    (note,) = result.notes
    assert "prompt 1, output token 0: 3 here, 2 in transformers" in note
    assert note.endswith("a tie")


# --- prompts and text ---------------------------------------------------------------------------


@given(num_tokens=st.integers(2, 300), length=st.integers(2, 80))
def test_windows_score_each_token_once_with_half_a_window_before_it(
    num_tokens: int, length: int
) -> None:
    scored: list[int] = []
    for begin, end, first in text_windows(num_tokens, length):
        assert 0 <= begin < first < end <= num_tokens
        assert end - begin <= length
        assert begin == 0 or first - begin >= length // 2
        scored += range(first, end)
    assert scored == list(range(1, num_tokens))


def test_default_prompts_suit_a_vocabulary_without_text(checkpoint: Checkpoint) -> None:
    class OnlyIds:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": []}

    prompts = default_prompts(OnlyIds(), 50, 8, 20, random.Random(0))
    assert len(prompts) == 8
    assert all(1 <= len(prompt) <= 20 for prompt in prompts)
    assert max(max(prompt) for prompt in prompts) < 50
    assert prompts[3][: len(prompts[2])] == prompts[2]


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint) -> LoadedModel:
    return load_model(checkpoint("llama"), device="cpu")


def gather(loaded: LoadedModel, **changes: Any) -> Any:
    options = {"prompts_file": None, "prompts_count": 2, "text_file": None, "max_tokens": 8}
    return gather_inputs(loaded, **{**options, "seed": 0, **changes})


def test_prompts_and_text_are_read_from_files(llama: LoadedModel, tmp_path: Path) -> None:
    lines, table, text = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "t.txt"
    lines.write_text("One\n\n  Größe\n", encoding="utf-8")
    table.write_text('"One"\n[5, 6, 7]\n', encoding="utf-8")
    text.write_text("ab", encoding="utf-8")
    inputs = gather(llama, prompts_file=lines, text_file=text)
    assert [llama.tokenizer.decode(ids) for ids in inputs.prompts] == ["One", "  Größe"]
    assert llama.tokenizer.decode(inputs.text_ids) == "ab"
    assert gather(llama, prompts_file=table).prompts == (inputs.prompts[0], (5, 6, 7))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", None, r"--prompts: cannot read .*p\.txt: No such file"),
        ("p.txt", b"\xff\xfe", r"--prompts: .*p\.txt is not UTF-8 \(byte 0\); convert it"),
        ("p.txt", b"\n \n", r"--prompts: .*p\.txt has no prompts; give one per line"),
        ("p.txt", b"ok\n" + b"a" * 300, r"line 2: 300 tokens; allowed: at most 248, .* shorten it"),
        ("p.jsonl", b"{", r"p\.jsonl, line 1: not JSON"),
        ("p.jsonl", b"[1, 300]", r"line 1: prompt\[1\]: got 300; allowed: .* 0 to 299"),
        ("p.jsonl", b"3", r"line 1: prompt: got 3; allowed: text, token ids or chat messages"),
        ("p.jsonl", b'[{"role": "user", "content": "x"}]', r"line 1: .* no chat template"),
    ],
)
def test_bad_prompt_files_are_refused_with_the_line(
    llama: LoadedModel, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=says):
        gather(llama, prompts_file=tmp_path / name)


def test_bad_texts_are_refused(llama: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a")
    with pytest.raises(ConfigurationError, match=r"--text: .* has 1 token; give at least two"):
        gather(llama, text_file=tmp_path / "t")
    with pytest.raises(ConfigurationError, match="--text: cannot read"):
        gather(llama, text_file=tmp_path)
