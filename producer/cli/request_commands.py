"""``penstock submit | stream | result | cancel | embed | infer``: requests from a shell."""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import signal
import sys
from collections.abc import Coroutine, Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from penstock.shared.errors import InvalidRequest, PenstockError, ProtocolError, RequestFailed
from penstock.shared.protocol.events import Chunk
from penstock.shared.protocol.parsing import parse_json
from penstock.shared.protocol.payload import json_form
from penstock.shared.protocol.states import Lane, State
from penstock.shared.settings import Settings

from ..client import Producer
from ..stream import TokenStream
from .batches.session import open_watch
from .options import JsonOption, read_prompt, with_client_settings
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
from .request_flags import read_request_options, with_request_options

__all__ = ["cancel", "embed", "infer", "result", "stream", "submit"]

_NOTICE_AFTER_S = 1.0
"""How long the first token may take before a missing worker is reported."""

_LINES_AT_ONCE = 2048
_PAYLOADS_AT_ONCE = 256
_PAYLOAD_DEPTH = 100

IdArgument = Annotated[str, typer.Argument(help="Id of the request.", show_default=False)]
TimeoutOption = Annotated[
    float | None, typer.Option(help="Give up after this many seconds; the request runs on.")
]


@with_client_settings
@with_request_options
def submit(
    *,
    prompt: Annotated[
        str, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ],
    id: Annotated[
        str | None, typer.Option(help="Id of your own: the same id and request run once.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's chat message.")
    ] = False,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Have `penstock batches` call this URL at its end.",
            show_default=False,
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the output, or print the id only.")
    ] = True,
    json: JsonOption = False,
    settings: Settings,
    **options: Any,
) -> int:
    """Submit a prompt and show its output as it comes.

    While it is shown, Ctrl-C and SIGTERM cancel the request, and so does a pipe whose reader
    leaves. With --no-stream it runs on by itself; read it later with `penstock stream ID` or
    `penstock result ID`.
    """
    fields = read_request_options(options)
    request = read_prompt(prompt, chat=chat)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            async with open_watch(settings, webhook) as watch:
                submitted = await producer.submit(request, id=id, **fields)
                if watch is not None and webhook is not None:
                    await watch.watch(producer.keys, submitted.id, webhook)
            facts = submitted_facts(submitted)
            try:
                if json:
                    write_json({"event": "submitted", **facts} if stream else facts)
                elif not stream:
                    typer.echo(submitted.id)
                if not stream:
                    return 0
                shown = _show(producer, producer.stream(submitted.id), json=json)
                return await while_read(shown)
            except (asyncio.CancelledError, OSError):  # nobody reads it, or it cannot be written
                with contextlib.suppress(PenstockError):
                    await producer.cancel(submitted.id)
                write_note(f"cancelled {submitted.id}")
                raise

    return asyncio.run(_until_terminated(run()))


@with_client_settings
def stream(
    *,
    id: IdArgument,
    from_index: Annotated[int, typer.Option(help="First token wanted.")] = 0,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """Show the output of a request, from the beginning or any token, as it comes.

    Ctrl-C leaves the request alone.
    """

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            tokens = producer.stream(id, from_index=from_index, timeout=timeout)
            return await while_read(_within(timeout, id, _show(producer, tokens, json=json)))

    return asyncio.run(run())


@with_client_settings
def result(
    *,
    id: IdArgument,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """Wait for the end of a request and print its whole output."""

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


@with_client_settings
def cancel(
    *,
    id: IdArgument,
    json: JsonOption = False,
    settings: Settings,
) -> int:
    """End a request at once, queued or running."""

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


@with_client_settings
def embed(
    *,
    texts: Annotated[
        list[str],
        typer.Argument(help="Texts; - reads standard input, a text a line.", show_default=False),
    ],
    dimensions: Annotated[
        int | None, typer.Option(help="How many numbers of each vector to keep.")
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Bring vectors to length 1 in any case.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Name of a prompt of the checkpoint, such as query.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut what is too long; else it is refused.")
    ] = False,
    settings: Settings,
) -> int:
    """Embed texts: for each a line of JSON with `index` and `embedding`, in their order."""
    source = _lines() if texts == ["-"] else iter(texts)

    async def run() -> int:
        number = tokens = 0
        async with Producer(settings=settings) as producer:
            while part := list(islice(source, _LINES_AT_ONCE)):
                found = await producer.embed(
                    part,
                    dimensions=dimensions,
                    normalize=normalize,
                    prompt=prompt,
                    truncate=truncate,
                )
                for vector in found.json_arrays():
                    typer.echo(f'{{"index":{number},"embedding":{vector}}}')
                    number += 1
                tokens += found.tokens
        write_note(f"{number} texts, {tokens} tokens")
        return 0

    return asyncio.run(run())


@with_client_settings
def infer(
    *,
    payloads: Annotated[
        list[str],
        typer.Argument(
            help="Payloads in JSON; - reads standard input, a payload a line.", show_default=False
        ),
    ],
    lane: Annotated[Lane, typer.Option(help="How urgent they are.")] = Lane.NORMAL,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Who pays.")] = "default",
    timeout: TimeoutOption = None,
    settings: Settings,
) -> int:
    """Have a batcher compute payloads: for each a line of JSON with its result, in their order.

    Bytes in a result are written as base64.
    """
    source = enumerate(_lines() if payloads == ["-"] else payloads, start=1)

    async def run() -> int:
        async with Producer(settings=settings) as producer:
            while part := [_payload(*given) for given in islice(source, _PAYLOADS_AT_ONCE)]:
                found = await asyncio.gather(
                    *(
                        producer.infer(payload, lane=lane, tenant=tenant, timeout=timeout)
                        for payload in part
                    )
                )
                for value in found:
                    typer.echo(_as_json(value))
        return 0

    return asyncio.run(run())


def _payload(number: int, text: str) -> object:
    return parse_json(f"payload {number}", text, "JSON", max_depth=_PAYLOAD_DEPTH)


def _as_json(value: object) -> str:
    try:
        return json_module.dumps(json_form(value), ensure_ascii=False)
    except ValueError:
        raise ProtocolError("result", value, "a value without NaN and infinity") from None


async def _show(producer: Producer, tokens: TokenStream, *, json: bool) -> int:
    """Write a stream as it comes; the exit code says whether it was completed."""
    writer = ChoiceWriter()
    async with tokens:
        try:
            with waiting("waiting for the first token"):
                chunk = await _first_chunk(producer, tokens)
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


async def _first_chunk(producer: Producer, tokens: TokenStream) -> Chunk | None:
    """The first chunk, or None at the end; after a second, report a model without workers."""
    notice = asyncio.create_task(_note_missing_workers(producer))
    try:
        return await anext(tokens, None)
    finally:
        notice.cancel()
        await asyncio.wait([notice])


async def _note_missing_workers(producer: Producer) -> None:
    await asyncio.sleep(_NOTICE_AFTER_S)
    with contextlib.suppress(PenstockError):  # the stream meets an outage itself
        if await producer.count_workers():
            return
        keys = producer.keys
        others = await producer.served_models()
        served = ", ".join(f"{other.model} (shard {other.shard})" for other in others)
        there = f"; served on this server: {served}" if served else ""
        write_note(
            f"no worker serves model {keys.model!r}, shard {keys.shard}, now{there}; "
            "the request waits until its deadline"
        )


async def _until_terminated(work: Coroutine[None, None, int]) -> int:
    """Do the work; SIGTERM cancels it, and the exit code is then that of a shell for SIGTERM."""
    task, terminated = asyncio.ensure_future(work), False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated:
            return 128 + signal.SIGTERM
        raise


async def _within(timeout: float | None, request_id: str, work: Any) -> int:
    try:
        async with asyncio.timeout(timeout):
            code: int = await work
            return code
    except TimeoutError:
        message = f"request {request_id!r} did not end within {timeout:g} s"
        raise TimeoutError(message) from None


def _lines() -> Iterator[str]:
    """The lines of standard input, without their ends.

    Raises:
        InvalidRequest: one is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise InvalidRequest(f"line {number}", line, "UTF-8 text") from None
