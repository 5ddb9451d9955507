"""``penstock submit | stream | result | cancel``: one request from the command line."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import typer

from penstock.shared.errors import PenstockError, RequestFailed
from penstock.shared.protocol.states import State

from ..client import Producer
from ..stream import TokenStream
from .options import (
    ConfigOption,
    JsonOption,
    ModelOption,
    RedisOption,
    ShardOption,
    client_settings,
    given,
    read_prompt,
    read_text,
)
from .output import (
    ChoiceWriter,
    chunk_facts,
    end_facts,
    result_facts,
    submitted_facts,
    summary,
    waiting,
    write_choices,
    write_json,
    write_note,
)
from .pipe import while_read

__all__ = ["cancel", "result", "stream", "submit"]

IdArgument = Annotated[str, typer.Argument(help="Id of the request.", show_default=False)]
TimeoutOption = Annotated[
    float | None, typer.Option(help="Give up after so many seconds; the request runs on.")
]


def submit(
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ],
    id: Annotated[
        str | None, typer.Option(help="Name of your own: the same id and request run once.")
    ] = None,
    lane: Annotated[str, typer.Option(help="critical, normal or batch.")] = "normal",
    tenant: Annotated[str, typer.Option(help="Who pays.")] = "default",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's chat message.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens at most; default: 256.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: 1.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k likeliest tokens; default: all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep this probability mass; default: 1.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens this much less likely than the best; default: 0."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Over 1: repeat less of prompt and output; default: 1.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Over 0: fewer tokens that the output has; default: 0.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, times how often it has them; default: 0.")
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Output tokens at least; default: 0.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: report so many likeliest tokens each; default: none."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same of the prompt's tokens; default: none.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same tokens; default: from id.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")
    ] = False,
    json_schema: Annotated[
        str | None, typer.Option(help="The output is JSON of this schema; @FILE reads it.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The output is a text that this matches; or @FILE.")
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(help="The output is of this grammar (Lark); or @FILE.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The output is this or another such text.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", "-n", help="Outputs, shown one after the other; default: 1."),
    ] = None,
    best_of: Annotated[
        int | None, typer.Option(help="Generate so many and give the n likeliest; default: n.")
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Over 1: beam search with so many beams; default: 1.")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(help="Of beam search: over 0 favours longer outputs; default: 1."),
    ] = None,
    early_stopping: Annotated[
        str | None, typer.Option(help="Of beam search: true, false or never; default: false.")
    ] = None,
    speculation: Annotated[
        str | None, typer.Option(help="Drafts from: auto, off, ngram or draft; default: auto.")
    ] = None,
    deadline_ms: Annotated[int | None, typer.Option(help="Time for all of it, in ms.")] = None,
    max_queue_ms: Annotated[
        int | None, typer.Option(help="Longest wait for a worker, in ms.")
    ] = None,
    on_disconnect: Annotated[
        str | None,
        typer.Option(help="When no reader is left: cancel or continue; default: continue."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the output, or print the id only.")
    ] = True,
    json: JsonOption = False,
    redis: RedisOption = None,
    model: ModelOption = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
) -> int:
    """Submit a prompt and show its output as it comes.

    Ctrl-C while it is shown cancels the request, and so does a pipe whose reader leaves. With
    --no-stream it runs on by itself; read it later with `penstock stream ID` or `penstock result
    ID`.
    """
    settings = client_settings(redis, model, shard, config)
    fields = given(
        id=id,
        lane=lane,
        tenant=tenant,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=seed,
        stop=stop,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=_flag_or_word(early_stopping),
        speculation=speculation,
        deadline_ms=deadline_ms,
        max_queue_ms=max_queue_ms,
        on_disconnect=on_disconnect,
        ignore_eos=ignore_eos or None,
        json_schema=read_text("json_schema", json_schema),
        regex=read_text("regex", regex),
        grammar=read_text("grammar", grammar),
        choice=choice or None,
    )
    request = read_prompt(prompt, chat=chat)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            submitted = await producer.submit(request, **fields)
            facts = submitted_facts(submitted)
            try:
                if json:
                    write_json({"event": "submitted", **facts} if stream else facts)
                elif not stream:
                    typer.echo(submitted.id)
                if not stream:
                    return 0
                return await while_read(_show(producer.stream(submitted.id), json=json))
            except (asyncio.CancelledError, OSError):  # nobody reads it, or it cannot be written
                with contextlib.suppress(PenstockError):
                    await producer.cancel(submitted.id)
                write_note(f"cancelled {submitted.id}")
                raise

    return asyncio.run(run())


def stream(
    id: IdArgument,
    from_index: Annotated[int, typer.Option(help="First token wanted.")] = 0,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
    redis: RedisOption = None,
    model: ModelOption = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
) -> int:
    """Show the output of a request, from the beginning or any token, as it comes.

    Ctrl-C leaves the request alone.
    """
    settings = client_settings(redis, model, shard, config)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            tokens = producer.stream(id, from_index=from_index, timeout=timeout)
            return await while_read(_within(timeout, id, _show(tokens, json=json)))

    return asyncio.run(run())


def result(
    id: IdArgument,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
    redis: RedisOption = None,
    model: ModelOption = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
) -> int:
    """Wait for the end of a request and print its whole output."""
    settings = client_settings(redis, model, shard, config)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            with waiting("waiting for the end"):
                found = await producer.result(id, timeout=timeout, check=False)
        if json:
            write_json(result_facts(found))
            return 0 if found.state is State.COMPLETED else 1
        write_choices(found.choices)
        found.check()
        return 0

    return asyncio.run(run())


def cancel(
    id: IdArgument,
    json: JsonOption = False,
    redis: RedisOption = None,
    model: ModelOption = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
) -> int:
    """End a request at once, queued or running."""
    settings = client_settings(redis, model, shard, config)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            reply = await producer.cancel(id)
        assert reply.state is not None
        if json:
            write_json({"id": id, "state": reply.state.value, "changed": reply.changed})
        else:
            typer.echo(reply.state.value if reply.changed else f"was already {reply.state.value}")
        return 0

    return asyncio.run(run())


async def _show(tokens: TokenStream, *, json: bool) -> int:
    """Write a stream as it comes; the exit code says whether it was completed."""
    writer = ChoiceWriter()
    async with tokens:
        try:
            with waiting("waiting for the first token"):
                chunk = await anext(tokens, None)
            while chunk is not None:
                if json:
                    write_json(chunk_facts(tokens.id, chunk))
                else:
                    writer.write(chunk)
                chunk = await anext(tokens, None)
        finally:
            writer.close()
    end = tokens.end
    assert end is not None
    if json:
        write_json(end_facts(tokens.id, end))
        return 0 if end.state is State.COMPLETED else 1
    if end.state is not State.COMPLETED:
        raise RequestFailed(tokens.id, end.state, end.reason, end.message)
    write_note(summary(end))
    return 0


def _flag_or_word(value: str | None) -> bool | str | None:
    """What a command line can only say as a word: true and false are values of their own."""
    return {"true": True, "false": False}.get(value or "", value)


async def _within(timeout: float | None, request_id: str, work: Any) -> int:
    try:
        async with asyncio.timeout(timeout):
            code: int = await work
            return code
    except TimeoutError:
        message = f"request {request_id!r} did not end within {timeout:g} s"
        raise TimeoutError(message) from None
