"""Figures of a trained model: perplexity by position, agreement of draft and target, samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Perplexity:
    """Perplexity per token; ``by_position`` maps the end of a position range to its perplexity."""

    overall: float
    bits_per_byte: float
    by_position: dict[int, float]


def pack(documents: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Documents end to end, cut into windows: int64 [count, length + 1]; a rest is left out."""
    stream = torch.tensor([token for ids in documents for token in ids])
    width = length + 1
    count = len(stream) // width
    if count == 0:
        raise ValueError(f"{len(stream)} held-out tokens do not fill a window of {width}")
    return stream[: count * width].view(count, width)


@torch.inference_mode()
def perplexity(
    model: LlamaForCausalLM,
    windows: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
    edges: Sequence[int] = (),
) -> Perplexity:
    """Perplexity of ``windows`` [count, length + 1], each read from position 0 on."""
    was_training = model.training
    model.eval()
    model.set_attn_implementation("sdpa")
    losses = []
    for window in windows:
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        losses.append(functional.cross_entropy(logits.float(), window[1:], reduction="none"))
    model.train(was_training)
    loss = torch.stack(losses)
    text = tokenizer.batch_decode(windows[:, 1:].tolist(), skip_special_tokens=True)
    size = sum(len(part.encode()) for part in text)
    by_position = {}
    for begin, end in zip((0, *edges), edges, strict=False):
        if begin < loss.shape[1]:
            by_position[end] = math.exp(float(loss[:, begin:end].mean()))
    return Perplexity(
        math.exp(float(loss.mean())), float(loss.sum()) / math.log(2) / size, by_position
    )


@torch.inference_mode()
def agreement_on_text(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: torch.Tensor
) -> float:
    """Share of positions of given text at which both models' most likely token is the same."""
    equal = total = 0
    for window in windows:
        inputs = window[None, :-1]
        chosen = [m(input_ids=inputs, use_cache=False).logits.argmax(-1) for m in (target, draft)]
        equal += int((chosen[0] == chosen[1]).sum())
        total += inputs.numel()
    return equal / total


@torch.inference_mode()
def agreement_on_generation(
    target: Any, draft: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int
) -> float:
    """Share of the target's own greedy tokens that the draft would have proposed.

    ``prompts`` is int64 [count, length]; ``target`` is a model with ``generate``, whose typing in
    transformers does not accept its own classes. This is the acceptance rate of
    the first draft token in greedy speculative decoding.
    """
    full = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
    )
    proposed = draft(input_ids=full[:, :-1], use_cache=False).logits.argmax(-1)
    length = prompts.shape[1]
    made = full[:, length:]
    # generate() fills rows that ended early with the pad token: not a proposal to judge.
    real = made != target.config.pad_token_id
    return float((proposed[:, length - 1 :] == made)[real].float().mean())


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    chat: bool,
    temperature: float,
    new_tokens: int = 120,
    seed: int = 1,
) -> str:
    """The model's continuation of ``prompt`` (or its answer to it), special tokens left out."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0}
    output = model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=new_tokens,
        **options,
    )
    made = output[0, inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))
