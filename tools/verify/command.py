"""The worker's commands of the ``penstock`` program, found through ``penstock.commands``.

What they need of torch is imported when they run, so that ``penstock --help`` stays fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..report_view import show_progress, show_report

__all__ = ["verify"]


def verify(
    model: Annotated[
        str, typer.Option(help="Directory of the checkpoint, or 'demo' for the model shipped here.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, one per line of UTF-8 text; in a .jsonl file each line is a string, a "
            "list of token ids or a list of chat messages. Without it they are drawn by --seed.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text whose perplexity is compared. Without it, an excerpt of Python's own "
            "reference.",
            show_default=False,
        ),
    ] = None,
    prompts_count: Annotated[
        int | None,
        typer.Option(
            help="Prompts to draw where no --prompts are given; 8 by default.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each prompt.")] = 24,
    context: Annotated[
        int, typer.Option(help="Tokens of the text that are looked at together.")
    ] = 512,
    seed: Annotated[int, typer.Option(help="Of prompts, chunkings and batch mixes.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32, float16, bfloat16, or auto as the worker chooses.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads; by default one for a small model, else torch's choice."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes.")
    ] = False,
) -> None:
    """Prove that a checkpoint gives here what it gives in transformers.

    Loads it twice, here and in transformers (so it takes the memory of two), and compares greedy
    tokens in random batch mixes, logits, and the perplexity of a text. Exit code 0: all checks
    hold; 1: one does not; 2: the input is wrong, or this model is not supported.
    """
    from . import VerifyOptions, verify_model

    options = VerifyOptions(
        model=model,
        prompts_file=prompts,
        prompts_count=prompts_count,
        text_file=text,
        max_tokens=max_tokens,
        context=context,
        seed=seed,
        dtype=dtype,
        device=device,
        threads=threads,
    )
    with show_progress() as progress:
        report = verify_model(options, progress)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        show_report(
            report,
            title=f"penstock verify: {report.subject}",
            passed="verified: this model gives here what it gives in transformers",
            failed="NOT verified: {names} above the limit; do not serve it",
        )
    raise typer.Exit(0 if report.ok else 1)
