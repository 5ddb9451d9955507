"""The lines of a batch through the engine alone, in a process that does nothing else."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.shared.errors import PenstockError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.request import Request
from penstock.shared.settings import Settings

__all__ = ["offline_seconds"]


def offline_seconds(settings: Settings, prompts: Sequence[str], max_tokens: int) -> float:
    """Seconds that an engine needs to answer chat messages, all of them there from the start.

    Args:
        settings: of the model and its engine.
        prompts: a user's message each.
        max_tokens: tokens of each answer, exactly.

    Raises:
        PenstockError: the process ended without an answer.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_run, args=(settings.model_dump_json(), list(prompts), max_tokens, theirs)
    )
    process.start()
    theirs.close()
    try:
        seconds: float = ours.recv()
        return seconds
    except EOFError:
        raise PenstockError("the offline run ended without an answer") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(line: str, prompts: Sequence[str], max_tokens: int, answer: Connection) -> None:
    from penstock.gpu_worker.model.build import build_model

    model = build_model(Settings.model_validate_json(line))
    engine = Engine(model.config, model.new_text_stream)
    began = time.perf_counter()
    coming = (
        Request.build(
            id=str(number),
            prompt=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    )
    waiting = 0
    with calm_collector():
        while True:
            while waiting < 2 * model.config.max_sequences and (one := next(coming, None)):
                ids = tuple(model.encode(one))
                engine.add(
                    EngineRequest(
                        id=one.id,
                        lane=one.lane,
                        tenant=one.tenant,
                        prompt_ids=ids,
                        options=one.options,
                        seed=one.seed,
                        arrival=time.monotonic(),
                    )
                )
                waiting += 1
            plan = engine.schedule()
            if plan is None:
                break
            updates = engine.collect(plan, model.runner.run(plan))
            waiting -= sum(update.finish is not None for update in updates)
    assert not waiting
    answer.send(time.perf_counter() - began)
