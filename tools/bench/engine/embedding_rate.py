"""Embeddings a second: many clients with a text each, against sentence-transformers."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.producer import Producer
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import load_settings

from ...report import Progress, Report
from ...rounds import Machine, Rounds, percentile
from ..options import EmbedOptions
from .worker_process import worker_process

__all__ = ["bench_embed"]

_NAME = "bench"
_SEED = 7
_MEDIAN_WORDS = 12


def bench_embed(options: EmbedOptions, progress: Progress = lambda *_: None) -> Report:
    """Measure texts a second through Redis and a worker, and those of ``encode``.

    Raises:
        ConfigurationError: sentence-transformers is not installed, or a setting is wrong.
        PenstockError: server or worker do not start.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = options.model
        if path == "minilm":
            path = str(_random_minilm(Path(folder)))
        return asyncio.run(_bench(options, path, progress))


async def _bench(options: EmbedOptions, path: str, progress: Progress) -> Report:
    texts, rounds = _texts(options.texts), Rounds()
    encode = _reference(path, options.threads)
    async with EmbeddedRedis() as server:
        flags = {
            "redis.url": server.url,
            "model.path": path,
            "queue.model": _NAME,
            "engine.threads": options.threads,
            "worker.metrics_port": "off",
        }
        async with worker_process(load_settings(flags)), Producer(server.url, model=_NAME) as asker:
            await _ask(asker, texts[: options.clients], options.clients)
            machine = Machine()
            for done in range(options.rounds):
                progress("rounds", done, options.rounds)
                few = [[text] for text in texts[: max(1, len(texts) // 4)]]
                alone = await asyncio.to_thread(_rate, encode, few)
                rounds.add("encode_one_by_one_per_s", round(alone, 1))
                at_once = await asyncio.to_thread(_rate, encode, [texts])
                rounds.add("encode_one_call_per_s", round(at_once, 1))
                began = time.perf_counter()
                waits = await _ask(asker, texts, options.clients)
                ours = len(texts) / (time.perf_counter() - began)
                rounds.add("clients_per_s", round(ours, 1))
                rounds.add("clients_ms_p50", round(1000 * percentile(waits, 50), 1))
                rounds.add("clients_ms_p99", round(1000 * percentile(waits, 99), 1))
                rounds.add("times_one_by_one", round(ours / alone, 2))
                rounds.add("times_one_call", round(ours / at_once, 2))
    return rounds.report(
        "embed",
        machine,
        at_least=(("times_one_by_one", 1),),
        notes=[f"{options.clients} clients, {options.texts} texts, model {options.model}"],
    )


async def _ask(asker: Producer, texts: Sequence[str], clients: int) -> list[float]:
    """Seconds of each text, where each client sends its next one when it has its answer."""
    todo, waits = iter(texts), []

    async def client() -> None:
        for text in todo:
            began = time.perf_counter()
            await asker.embed(text)
            waits.append(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(clients)))
    return waits


def _rate(encode: Callable[[list[str]], object], calls: list[list[str]]) -> float:
    """Texts a second of these calls."""
    began = time.perf_counter()
    for texts in calls:
        encode(texts)
    return sum(map(len, calls)) / (time.perf_counter() - began)


def _reference(path: str, threads: int | None) -> Callable[[list[str]], object]:
    """``SentenceTransformer.encode``.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigurationError(
            "bench embed compares with sentence-transformers: pip install sentence-transformers"
        ) from error
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    model = SentenceTransformer(path, device="cpu", local_files_only=True)

    def encode(texts: list[str]) -> object:
        return model.encode(texts, show_progress_bar=False)

    return encode


def _texts(count: int) -> list[str]:
    """Texts of few to many words, with a long tail as queries and passages have it."""
    draw = random.Random(_SEED)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(400)]
    lengths = [max(2, round(_MEDIAN_WORDS * draw.lognormvariate(0, 0.6))) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def _random_minilm(folder: Path) -> Path:
    """A checkpoint of MiniLM's shape with random weights, and the demo model's words."""
    from tokenizers import processors
    from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

    from penstock.gpu_worker.model.loading.checkpoint import DEMO, find_checkpoint, quiet

    words = AutoTokenizer.from_pretrained(find_checkpoint(DEMO)).backend_tokenizer
    mark = words.id_to_token(0)
    words.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A {mark}", special_tokens=[(mark, 0)]
    )
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=mark, model_max_length=512
    )
    with quiet():
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
