"""The training loop shared by target (next token) and draft (distilled from the target)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from .batches import WindowSampler

logger = logging.getLogger("train_demo_model")

# Logits of 1024 x 4096 in fp32 are 16 MiB. At this size the allocator reuses the memory instead of
# mapping it anew at every step, which is worth a quarter of the speed on a CPU.
LOSS_CHUNK_TOKENS = 1024
EAGER_ATTENTION_UP_TO = 512


class DivergenceError(RuntimeError):
    """The loss is NaN, infinite or far above where it has been."""


@dataclass(frozen=True)
class Phase:
    """Steps take windows of ``lengths`` tokens in turn until ``until`` (a share of the run)."""

    lengths: tuple[int, ...]
    until: float


@dataclass(frozen=True)
class Schedule:
    """What one run does; it ends at ``steps`` or after ``seconds``, whichever is reached first.

    With ``seconds`` the learning rate follows the clock, so the result depends on the machine.
    Without, it depends on the seed only (on one kind of CPU and one torch version).
    """

    steps: int
    phases: tuple[Phase, ...]
    seconds: float | None = None
    tokens_per_step: int = 4096
    peak_rate: float = 2.5e-3
    warmup_steps: int = 60
    final_rate_fraction: float = 0.03
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1
    autocast: bool = True
    checkpoint_seconds: float = 120.0

    def progress(self, step: int, elapsed: float) -> float:
        by_time = elapsed / self.seconds if self.seconds else 0.0
        return min(1.0, max(step / self.steps, by_time))

    def rate(self, step: int, progress: float) -> float:
        """Linear warm-up, then cosine decay to ``final_rate_fraction`` of the peak."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        floor = self.final_rate_fraction
        return self.peak_rate * warmup * (floor + (1.0 - floor) * cosine)

    @property
    def lengths(self) -> list[int]:
        return sorted({length for phase in self.phases for length in phase.lengths})

    def length(self, step: int, progress: float) -> int:
        """Window length of the step: short ones are fast, long ones teach the whole context."""
        for phase in self.phases:
            if progress < phase.until:
                break
        return phase.lengths[step % len(phase.lengths)]


def build_model(
    *, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int,
    context: int, bos: int, eos: int, pad: int, seed: int,
) -> LlamaForCausalLM:  # fmt: skip
    """A freshly initialised Llama with tied embeddings, fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def initialise_draft(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Starts the draft from the target's embedding, first layers and last norm."""
    wanted = draft.state_dict()
    source = target.state_dict()
    draft.load_state_dict({name: source[name].clone() for name in wanted})


def hidden_states(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Final hidden states [batch, length, hidden]; attention by whatever is faster here."""
    eager = tokens.shape[1] <= EAGER_ATTENTION_UP_TO
    model.set_attn_implementation("eager" if eager else "sdpa")
    output: torch.Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return output


def _backward(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, window: torch.Tensor, autocast: bool
) -> float:
    """Adds the gradients of one batch [batch, length + 1]; returns the loss per token.

    Without a teacher the loss is cross entropy. With one it is KL(teacher || model): the cross
    entropy to the teacher's distribution minus that distribution's own entropy.
    """
    inputs, labels = window[:, :-1], window[:, 1:].reshape(-1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = hidden_states(model, inputs)
        if teacher is not None:
            with torch.no_grad():
                wisdom = hidden_states(teacher, inputs).flatten(0, 1)
    # The loss's own graph ends here, so each chunk's logits are freed before the next one's.
    leaf = hidden.detach().flatten(0, 1).requires_grad_()
    count = labels.numel()
    total = 0.0
    for start in range(0, count, LOSS_CHUNK_TOKENS):
        part = slice(start, start + LOSS_CHUNK_TOKENS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = functional.linear(leaf[part], model.lm_head.weight)
        if teacher is None:
            loss = functional.cross_entropy(logits.float(), labels[part], reduction="sum")
        else:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                goal = functional.linear(wisdom[part], teacher.lm_head.weight)
            loss = functional.kl_div(
                logits.float().log_softmax(-1),
                goal.float().log_softmax(-1),
                reduction="sum",
                log_target=True,
            )
        torch.autograd.backward(loss / count)
        total += float(loss.detach())
    assert leaf.grad is not None
    torch.autograd.backward(hidden, leaf.grad.view_as(hidden))
    return total / count


class Trainer:
    """One run of one model, resumable from its checkpoint file."""

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        documents: Sequence[Sequence[int]],
        schedule: Schedule,
        checkpoint: Path,
        teacher: LlamaForCausalLM | None = None,
        validate: Callable[[LlamaForCausalLM], float] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.teacher = teacher
        self.schedule = schedule
        self.checkpoint = checkpoint
        self.validate = validate
        self.samplers = {
            length: WindowSampler(
                documents,
                length,
                max(1, schedule.tokens_per_step // length),
                seed=schedule.seed * 10 + index,
            )
            for index, length in enumerate(schedule.lengths)
        }
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": schedule.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=schedule.peak_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.tokens = 0
        self.elapsed = 0.0
        self.batches_used = dict.fromkeys(schedule.lengths, 0)

    def resume(self) -> bool:
        """Continues from the checkpoint file if there is one."""
        if not self.checkpoint.exists():
            return False
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.elapsed, self.batches_used = state["elapsed"], state["batches_used"]
        logger.info("%s: resumed at step %d from %s", self.name, self.step, self.checkpoint)
        return True

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "tokens": self.tokens,
                "elapsed": self.elapsed,
                "batches_used": self.batches_used,
            },
            partial,
        )
        partial.replace(self.checkpoint)

    def run(self, log_every: int = 20) -> None:
        """Trains to the end of the schedule.

        Raises:
            DivergenceError: The loss is not finite, or after the warm-up is half as high again as
                the running mean of windows as long. (Positions that a model sees for the first
                time cost it more, so a phase with longer windows begins with a higher loss.)
        """
        schedule = self.schedule
        self.model.train()
        means: dict[int, float] = {}
        saved = mark = time.monotonic()
        start = mark - self.elapsed
        mark_tokens = self.tokens
        while (progress := schedule.progress(self.step, self.elapsed)) < 1.0:
            length = schedule.length(self.step, progress)
            loss = self._one_step(length, progress)
            self.elapsed = time.monotonic() - start
            mean = means[length] = 0.95 * means.get(length, loss) + 0.05 * loss
            self._check(loss, mean)
            if self.step % log_every == 0:
                now = time.monotonic()
                speed = (self.tokens - mark_tokens) / (now - mark)
                mark, mark_tokens = now, self.tokens
                done = schedule.progress(self.step, self.elapsed)
                logger.info(
                    "%s: step %d (%.0f %%) loss %.3f, %.0f tokens/s, ETA %.1f min",
                    self.name, self.step, 100 * done, mean, speed,
                    self.elapsed * (1 - done) / done / 60,
                )  # fmt: skip
            if time.monotonic() - saved > schedule.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
                if self.validate is not None:
                    logger.info(
                        "%s: held-out perplexity %.2f", self.name, self.validate(self.model)
                    )
        self.save()
        self.model.eval()

    def _one_step(self, length: int, progress: float) -> float:
        window = self.samplers[length].batch(self.batches_used[length])
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step, progress)
        # Zeroing in place keeps the gradients' memory mapped between steps.
        self.optimizer.zero_grad(set_to_none=False)
        loss = _backward(self.model, self.teacher, window, self.schedule.autocast)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip_norm)
        self.optimizer.step()
        self.batches_used[length] += 1
        self.step += 1
        self.tokens += window.numel() - window.shape[0]
        return loss

    def _check(self, loss: float, mean: float) -> None:
        limit = 1.5 * mean + 0.5
        if math.isfinite(loss) and (self.step < 2 * self.schedule.warmup_steps or loss < limit):
            return
        raise DivergenceError(
            f"{self.name}: loss {loss} at step {self.step} (running mean {mean:.3f}); the last "
            f"good state is in {self.checkpoint}; lower --rate or use --precision fp32"
        )
