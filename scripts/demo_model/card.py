"""Writes the model card, with the figures of the run it belongs to."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from .evaluate import Perplexity
from .figures import GENERATED_TOKENS, PROMPT_TOKENS, Figures
from .training import Trainer


def write_card(
    path: Path, figures: Figures, trainers: Sequence[Trainer], corpus: dict[str, int], seed: int
) -> None:
    """``trainers`` are those of target and draft; ``corpus`` has the counts of the split."""
    path.write_text(
        "\n\n".join(
            (
                _front(figures),
                _results(figures),
                _data(corpus),
                _use(figures),
                _training(trainers, seed),
                _samples(figures),
            )
        )
        + "\n",
        encoding="utf-8",
    )


def _front(figures: Figures) -> str:
    sizes = {name: size / 1e6 for name, size in figures.bytes.items()}
    return f"""\
# The demo model

A small Llama and a draft model for it, trained from nothing on the documentation that every
CPython carries. They exist so that the demo and the tests of penstock run a real language model
without a download. **They know nothing and are no use for anything else**: the text reads like
Python's documentation, and what it says is often wrong.

| | target | draft |
|---|---|---|
| directory | `target/` | `draft/` |
| architecture | `LlamaForCausalLM`, tied embeddings | the same |
| layers | {figures.layers["target"]} | {figures.layers["draft"]} |
| parameters | {figures.parameters["target"]:,} | {figures.parameters["draft"]:,} |
| weights | bf16 safetensors | bf16 safetensors |
| size with tokenizer | {sizes["target"]:.1f} MB | {sizes["draft"]:.1f} MB |
| context | {figures.context:,} tokens | {figures.context:,} tokens |

Both together are {sum(sizes.values()):.1f} MB. The draft is shallow rather than narrow because
at this size a step costs layers, not parameters."""


def _row(name: str, perplexity: Perplexity) -> str:
    positions = " | ".join(f"{value:.2f}" for value in perplexity.by_position.values())
    return f"| {name} | {perplexity.overall:.2f} | {perplexity.bits_per_byte:.3f} | {positions} |"


def _results(figures: Figures) -> str:
    ends = list(figures.perplexity["target"].by_position)
    ranges = [f"{a} to {b}" for a, b in zip((0, *ends), ends, strict=False)]
    header = " | ".join(("held-out text", "perplexity", "bits per byte", *ranges))
    rows = "\n".join(_row(name, value) for name, value in figures.perplexity.items())
    return f"""\
## Figures

Measured by the training script on the files as saved, computed in fp32, on documents that are not
in the training text. Perplexity is per token; the last columns are by position in a window of
{figures.context:,} tokens, so they show whether the model is usable up to its stated context.

| {header} |
|{"---|" * (3 + len(ranges))}
{rows}

How often the draft's most likely token is the target's (the acceptance rate of the first draft
token in greedy speculative decoding):

| on | agreement |
|---|---|
| the target's own greedy text ({PROMPT_TOKENS}-token held-out prompts, up to {GENERATED_TOKENS} \
tokens each) | {figures.agreement_generation:.1%} |
| held-out text | {figures.agreement_text:.1%} |"""


def _data(corpus: dict[str, int]) -> str:
    return f"""\
## Data and licence

The text is `pydoc_data.topics` (the language reference that `help()` prints) and the docstrings of
the standard library of CPython {platform.python_version()}: {corpus["documents"]:,} documents,
{corpus["bytes"] / 1e6:.2f} MB, every text once. {corpus["held_out_documents"]:,} more documents \
({corpus["held_out_tokens"]:,}
tokens), chosen by a hash of their name, are held out; the library repeats itself, so some of them
have near relatives in the training text. Each entry is also turned into a short
conversation, which gives {corpus["tokens"]:,} training tokens in all.

Python's documentation is copyright of the Python Software Foundation and used under the
[PSF licence version 2](https://docs.python.org/3/license.html), which permits derivative works.
The weights memorise parts of that text, so the same notice goes with them."""


def _use(figures: Figures) -> str:
    return f"""\
## Use

- Meant for demonstrations and tests of penstock only.
- The tokenizer is byte-level BPE; every UTF-8 text survives encoding and decoding exactly.
- **No token is added to a prompt.** `<|bos|>` opened each document in training, but windows were
  cut anywhere, so a plain prompt needs none. The chat template writes `<|bos|>` itself.
- `<|eos|>` ends a document and an assistant's turn. Roles are `system`, `user` and `assistant`.
- Like other Hugging Face tokenizers, this one reads the literal text `<|user|>` as the special
  token. Pass `split_special_tokens=True` to encode text that is not trusted.
- The context is {figures.context:,} tokens; nothing beyond it was trained.
- Greedy text repeats itself now and then, as small models do; temperature 0.7 reads better."""


def _training(trainers: Sequence[Trainer], seed: int) -> str:
    rows = []
    for trainer in trainers:
        windows = ", ".join(str(length) for length in trainer.schedule.lengths)
        loss = "next token" if trainer.teacher is None else "KL divergence from the target"
        rows.append(
            f"| {trainer.name} | {loss} | {trainer.step:,} | {trainer.tokens / 1e6:.1f} M "
            f"| {windows} | {trainer.schedule.peak_rate:g} | {trainer.elapsed / 60:.0f} min |"
        )
    seconds = trainers[0].schedule.seconds
    limit = ""
    if seconds is not None:
        limit = (
            "\nThe schedule followed a time limit, so another run gives other weights of the same\n"
            "kind."
        )
    precision = "bf16 autocast" if trainers[0].schedule.autocast else "fp32"
    return f"""\
## Training

By `scripts/train_demo_model.py` with seed {seed}, torch {torch.__version__}, transformers
{transformers.__version__}, on the CPU. AdamW on fp32 weights, {precision}, warm-up and cosine \
decay. The draft starts from the
target's embedding and first layers and also learns from texts the target wrote.{limit}

| | loss | steps | tokens | window (tokens) | peak rate | time |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}"""


def _samples(figures: Figures) -> str:
    blocks = ["## What it writes\n\nAs it comes, cut after 120 tokens."]
    for sample in figures.samples:
        kind = "Chat" if sample.chat else "Continue"
        how = "greedy" if sample.temperature == 0 else f"temperature {sample.temperature}"
        text = sample.text if sample.chat else sample.prompt + sample.text
        quoted = "\n".join(f"    {line}".rstrip() for line in text.strip("\n").split("\n"))
        blocks.append(f"**{kind}, {how}:** {sample.prompt}\n\n{quoted}")
    return "\n\n".join(blocks)
