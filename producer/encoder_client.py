"""The client's calls for encoders: embeddings, rankings and classes of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from penstock.shared.errors import RequestFailed
from penstock.shared.local.tasks import end_tasks

from .encoder_answers import Classes, Embeddings, Ranking, as_inputs, without_defaults

__all__ = ["EncoderClient"]

_PART_TEXTS = 256
_PART_BYTES = 1 << 18
"""Of one request at most: workers share long lists, and batches are filled by several clients."""

_T = TypeVar("_T")


class EncoderClient:
    """What a client of models that answer at once can ask of encoders.

    A long list of texts is divided into several requests, which any number of workers compute. With
    an ``id`` the first has this name, others ``id:N`` with the number N of their first text.
    """

    async def infer(self, payload: object, *, timeout: float | None = None, **fields: Any) -> Any:
        """The answer of a model that answers at once."""
        raise NotImplementedError

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool = False,
        prompt: str | None = None,
        truncate: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Embeddings:
        """Embed texts.

        Args:
            texts: a text, token ids, or a list of texts and lists of token ids. Ids are taken as
                they are; a text gets the tokenizer's special tokens.
            dimensions: how many numbers of each vector to keep, from the first on. Vectors that had
                length 1 are brought to length 1 again. None keeps what the checkpoint says.
            normalize: bring every vector to length 1. A checkpoint that does so needs no request.
            prompt: name of a prompt of the checkpoint, such as ``query`` or ``document``, which is
                put before each text. None takes the checkpoint's default.
            truncate: cut texts that are longer than the model's limit; else they are refused.
            timeout: longest wait in seconds.
            **fields: see :meth:`Producer.submit`.

        Raises:
            RequestFailed: the worker refused a text, or another kind of model is served.
            Exception: as :meth:`Producer.infer`.
        """
        options = without_defaults(
            dimensions=dimensions, normalize=normalize, prompt_name=prompt, truncate=truncate
        )
        parts = await self._infer_parts(
            "input", as_inputs(texts), options, Embeddings.of, timeout, fields
        )
        packed = tuple(item for part in parts for item in part.packed)
        return Embeddings(packed, sum(part.tokens for part in parts))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Ranking:
        """Say how well documents answer a query.

        Args:
            query: a text.
            documents: texts.
            truncate: cut what is longer than the model's limit; else it is refused.
            timeout: longest wait in seconds.
            **fields: see :meth:`Producer.submit`.

        Raises:
            Exception: as :meth:`embed`.
        """
        options = {"query": query, **without_defaults(truncate=truncate)}
        parts = await self._infer_parts(
            "documents", list(documents), options, Ranking.of, timeout, fields
        )
        scores = tuple(score for part in parts for score in part.scores)
        return Ranking(scores, sum(part.tokens for part in parts))

    async def classify(
        self,
        texts: str | Sequence[str | tuple[str, str]],
        *,
        truncate: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Classes:
        """Say which classes texts belong to.

        Args:
            texts: a text, or a list of texts, of lists of token ids, and of pairs of texts that
                are read together.
            truncate: cut what is longer than the model's limit; else it is refused.
            timeout: longest wait in seconds.
            **fields: see :meth:`Producer.submit`.

        Raises:
            Exception: as :meth:`embed`.
        """
        options = without_defaults(truncate=truncate)
        parts = await self._infer_parts(
            "input", as_inputs(texts), options, Classes.of, timeout, fields
        )
        probs = tuple(row for part in parts for row in part.probs)
        return Classes(parts[0].labels, probs, sum(part.tokens for part in parts))

    async def _infer_parts(
        self,
        field: str,
        texts: list[Any],
        options: dict[str, Any],
        read: Callable[[Any], _T],
        timeout: float | None,
        fields: dict[str, Any],
    ) -> list[_T]:
        """Ask for the texts in as many requests as they need."""
        name = fields.pop("id", None)

        async def ask(start: int, part: list[Any]) -> _T:
            own = fields
            if name is not None:
                own = {**fields, "id": name if start == 0 else f"{name}:{start}"}
            try:
                return read(await self.infer({field: part, **options}, timeout=timeout, **own))
            except RequestFailed as error:
                if start:
                    error.add_note(f"{field}[0] is the one with the number {start} in the list")
                raise

        tasks = [asyncio.create_task(ask(start, part)) for start, part in _parts(texts)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            await end_tasks(tasks)
            raise


def _parts(texts: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """The texts in parts of bounded size, with the number of each part's first; at least one."""
    start, size, part = 0, 0, []  # type: ignore[var-annotated]
    for number, text in enumerate(texts):
        num_bytes = _size(text)
        if part and (len(part) == _PART_TEXTS or size + num_bytes > _PART_BYTES):
            yield start, part
            start, size, part = number, 0, []
        part.append(text)
        size += num_bytes
    yield start, part


def _size(text: object) -> int:
    """About how many bytes it takes packed."""
    if isinstance(text, str):
        return 4 * len(text) if not text.isascii() else len(text)
    return sum(map(_size, text)) if isinstance(text, Sequence) else 4
