#!/usr/bin/env python
"""Trains the demo model and its draft on the documentation every CPython carries.

    python scripts/train_demo_model.py --out DIR [--steps N] [--minutes N] [--resume] [--smoke]

Nothing is downloaded. Writes ``DIR/target``, ``DIR/draft`` (bf16 safetensors, configuration,
tokenizer) and ``DIR/README.md`` (the model card with the figures of this run). The default takes
about half an hour on two cores. Where other programs want the same cores, set
``OMP_WAIT_POLICY=PASSIVE``: torch's threads otherwise burn the time they wait for each other.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from demo_model.batches import encode_documents
from demo_model.card import write_card
from demo_model.corpus import Document, load_documents
from demo_model.evaluate import pack, perplexity
from demo_model.figures import measure
from demo_model.selftext import write_texts
from demo_model.tokenizer import train_tokenizer
from demo_model.training import (
    DivergenceError,
    Phase,
    Schedule,
    Trainer,
    build_model,
    initialise_draft,
)
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

logger = logging.getLogger("train_demo_model")


@dataclass(frozen=True)
class Sizes:
    """Shapes of both models and of the run. ``context`` and lengths are in tokens."""

    vocab: int = 4096
    hidden: int = 192
    intermediate: int = 512
    heads: int = 6
    kv_heads: int = 2
    target_layers: int = 12
    draft_layers: int = 2
    context: int = 2048
    phases: tuple[Phase, ...] = (Phase((256,), 0.5), Phase((256, 512, 256, 2048), 1.0))
    documents: int | None = None
    tokens_per_step: int = 4096
    target_steps: int = 1900
    draft_steps: int = 1400
    self_text_rows: int = 640
    self_text_tokens: int = 128


SMOKE = Sizes(
    vocab=384, hidden=32, intermediate=64, heads=2, kv_heads=1, target_layers=2, draft_layers=1,
    context=128, phases=(Phase((32,), 0.5), Phase((32, 128), 1.0)), documents=60,
    tokens_per_step=256, target_steps=4, draft_steps=3, self_text_rows=8, self_text_tokens=16,
)  # fmt: skip
DRAFT_SHARE_OF_TIME = 0.2
SELF_TEXT_COPIES = 4


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, help="steps of the target (the draft's follow)")
    parser.add_argument("--minutes", type=float, help="end the training after this long")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16",
        help="of the forward and backward pass; the optimizer's weights are always fp32",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, help="checkpoints (default: OUT.work)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, seconds: checks the path")
    options = parser.parse_args(arguments)
    for name in ("steps", "minutes", "rate", "threads"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} {value}: must be above 0")
    options.work = options.work or options.out.with_name(options.out.name + ".work")
    return options


def schedules(sizes: Sizes, options: argparse.Namespace) -> tuple[Schedule, Schedule]:
    steps = options.steps or sizes.target_steps
    seconds = options.minutes * 60 if options.minutes else None
    target = Schedule(
        steps=steps,
        phases=sizes.phases,
        seconds=seconds and seconds * (1 - DRAFT_SHARE_OF_TIME),
        tokens_per_step=sizes.tokens_per_step,
        peak_rate=options.rate,
        seed=options.seed,
        autocast=options.precision == "bf16",
    )
    draft = replace(
        target,
        steps=max(1, round(steps * sizes.draft_steps / sizes.target_steps)),
        seconds=seconds and seconds * DRAFT_SHARE_OF_TIME,
        seed=options.seed + 1,
    )
    return target, draft


def new_model(
    sizes: Sizes, layers: int, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    return build_model(
        layers=layers, hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads,
        intermediate=sizes.intermediate, vocab=len(tokenizer), context=sizes.context,
        bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id,
        seed=seed,
    )  # fmt: skip


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes bf16 weights and everything ``from_pretrained`` wants; ``model`` becomes bf16."""
    model.bfloat16()
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, which another user's worker could not read


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    held_out = [d for d in documents if d.held_out]
    return [d for d in documents if not d.held_out], held_out


def written_by(
    target: LlamaForCausalLM,
    documents: list[list[int]],
    sizes: Sizes,
    options: argparse.Namespace,
) -> list[list[int]]:
    """The target's own texts, kept beside the checkpoints since they take minutes."""
    file: Path = options.work / "written.pt"
    if options.resume and file.exists():
        kept: list[list[int]] = torch.load(file, weights_only=True)
        return kept
    texts = write_texts(
        target, documents, rows=sizes.self_text_rows, new_tokens=sizes.self_text_tokens,
        seed=options.seed,
    )  # fmt: skip
    torch.save(texts, file)
    return texts


def train(options: argparse.Namespace) -> None:
    sizes = SMOKE if options.smoke else Sizes()
    training, held_out = split(load_documents(sizes.documents))
    tokenizer = train_tokenizer((d.plain for d in training), sizes.vocab, sizes.context)
    documents = encode_documents(training, tokenizer)
    reserve = encode_documents(held_out, tokenizer, chats=False)
    logger.info(
        "%d documents (%.2f MB), %d tokens with chats; %d documents, %d tokens held out",
        len(training), sum(len(d.plain.encode()) for d in training) / 1e6,
        sum(map(len, documents)), len(held_out), sum(map(len, reserve)),
    )  # fmt: skip
    probe = pack(reserve, sizes.phases[0].lengths[0])[:40]

    def validate(model: LlamaForCausalLM) -> float:
        return perplexity(model, probe, tokenizer).overall

    target_schedule, draft_schedule = schedules(sizes, options)
    target = new_model(sizes, sizes.target_layers, tokenizer, options.seed)
    began = time.monotonic()
    trainers = []
    trainer = Trainer(
        "target", target, documents, target_schedule, options.work / "target.pt", validate=validate
    )
    trainers.append(trainer)
    if options.resume:
        trainer.resume()
    trainer.run()

    draft = new_model(sizes, sizes.draft_layers, tokenizer, options.seed + 1)
    initialise_draft(draft, target)
    lessons = documents + SELF_TEXT_COPIES * written_by(target, documents, sizes, options)
    trainer = Trainer(
        "draft", draft, lessons, draft_schedule, options.work / "draft.pt",
        teacher=target, validate=validate,
    )  # fmt: skip
    trainers.append(trainer)
    if options.resume:
        trainer.resume()
    trainer.run()
    logger.info("trained in %.1f min; measuring", (time.monotonic() - began) / 60)

    for model, name in ((target, "target"), (draft, "draft")):
        save(model, tokenizer, options.out / name)
    figures = measure(options.out, pack(reserve, sizes.context), sizes.context)
    logger.info("%s", figures)
    counts = {
        "documents": len(training),
        "bytes": sum(len(d.plain.encode()) for d in training),
        "tokens": sum(map(len, documents)),
        "held_out_documents": len(held_out),
        "held_out_tokens": sum(map(len, reserve)),
    }
    write_card(options.out / "README.md", figures, trainers, counts, options.seed)


def keep_memory_mapped() -> None:
    """Stops glibc from returning large buffers to the kernel between steps.

    Every step allocates the same activations; faulting them in anew costs about a fifth of the
    speed. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout
    )
    torch.set_num_threads(options.threads)
    keep_memory_mapped()
    try:
        train(options)
    except DivergenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
