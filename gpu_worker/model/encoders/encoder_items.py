"""Items of many requests on their way through one encoder.

An item is a map, and may hold many texts. The texts of all items are computed together. What is
wrong with an item becomes an :class:`InvalidRequest` at its place; the others are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.shared.errors import InvalidRequest, ModelError, PenstockError

from .encoder import Encoder, Row, Text

__all__ = [
    "Work",
    "estimate_tokens",
    "read_flag",
    "read_map",
    "read_text",
    "read_texts",
    "run_items",
]

MAX_TEXTS = 2048
"""Texts of one item."""

_NOT_FINITE = (
    "the model computed infinity or no number for this text; serve it with model.dtype = float32"
)


@dataclass(frozen=True, slots=True)
class Work:
    """An item that was read.

    Attributes:
        texts: what is computed.
        fields: where each comes from, for errors.
        truncate: whether texts that are too long are cut; else they are refused.
        options: what the answer is made by.
    """

    texts: Sequence[Text]
    fields: Sequence[str]
    truncate: bool
    options: Any = None


def run_items(
    encoder: Encoder,
    items: Sequence[object],
    read: Callable[[Mapping[str, Any]], Work],
    compute: Callable[[Sequence[Row], Sequence[Work]], Tensor],
    answer: Callable[[Work, Tensor, int], dict[str, Any]],
) -> list[dict[str, Any] | PenstockError]:
    """Answer items; what cannot be answered has an error in its place.

    Args:
        encoder: tokenizes.
        items: maps.
        read: checks an item's map.
        compute: values of rows ``[rows, ...]``, given the work of each row.
        answer: makes an item's answer of its work, its rows of the values, and its tokens.
    """
    results: list[Any] = []
    for item in items:
        try:
            results.append(read(read_map(item)))
        except InvalidRequest as error:
            results.append(error)
    works = [work for work in results if isinstance(work, Work)]
    rows = iter(encoder.rows([text for work in works for text in work.texts]))
    all_rows: list[Row] = []
    owners: list[Work] = []
    for index, work in enumerate(results):
        if not isinstance(work, Work):
            continue
        own = [next(rows) for _ in work.texts]
        try:
            own = [_checked(encoder, work, *pair) for pair in enumerate(own)]
        except InvalidRequest as error:
            results[index] = error
            continue
        all_rows += own
        owners += [work] * len(own)
    values = compute(all_rows, owners) if all_rows else None
    start = 0
    for index, work in enumerate(results):
        if isinstance(work, Work):
            assert values is not None
            stop = start + len(work.texts)
            num_tokens = sum(len(row.ids) for row in all_rows[start:stop])
            own_values = values[start:stop]
            if own_values.isfinite().all():
                results[index] = answer(work, own_values, num_tokens)
            else:
                results[index] = ModelError(_NOT_FINITE)
            start = stop
    return results


def _checked(encoder: Encoder, work: Work, index: int, row: Row) -> Row:
    """The row, cut if it is too long and that was asked for.

    Raises:
        InvalidRequest: it is too long, empty, or has an id that the model does not know.
    """
    field = work.fields[index]
    if len(row.ids) > encoder.max_tokens:
        if not work.truncate:
            allowed = (
                f"at most {encoder.max_tokens} tokens, this model's limit, special ones included; "
                "cut the text, or ask for truncate"
            )
            raise InvalidRequest(field, f"{len(row.ids)} tokens", allowed)
        row = encoder.cut(work.texts[index])
    if not row.ids:
        raise InvalidRequest(field, work.texts[index], "a text that has at least one token")
    if max(row.ids) >= encoder.vocab_size:
        allowed = f"token ids below {encoder.vocab_size}, this model's vocabulary"
        raise InvalidRequest(field, max(row.ids), allowed)
    return row


def estimate_tokens(texts: object) -> int:
    """About how many tokens texts have, before they are tokenized: UTF-8 bytes over 4."""
    if isinstance(texts, str):
        return len(texts.encode(errors="replace")) // 4 + 2
    if not isinstance(texts, Sequence):
        return 1
    if texts and isinstance(texts[0], int):
        return len(texts)
    return sum(map(estimate_tokens, texts))


def read_map(value: object) -> Mapping[str, Any]:
    """An item.

    Raises:
        InvalidRequest: it is no map with text as keys.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest("payload", value, "a map of the model's fields")
    return value


def read_texts(value: object, field: str, *, ids: bool = True, pairs: bool = False) -> list[Text]:
    """The list of texts in a field.

    Args:
        value: what the field holds.
        field: its name.
        ids: whether lists of token ids may stand for texts.
        pairs: whether lists of two texts, which are read together, may.

    Raises:
        InvalidRequest: it is no such list.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidRequest(field, value, "a list of at least one text")
    if len(value) > MAX_TEXTS:
        raise InvalidRequest(field, f"{len(value)} texts", f"at most {MAX_TEXTS} texts")
    return [_text(text, f"{field}[{n}]", ids, pairs) for n, text in enumerate(value)]


def read_text(value: object, field: str) -> str:
    """A text in a field.

    Raises:
        InvalidRequest: it is none, or has no UTF-8 form.
    """
    if not isinstance(value, str):
        raise InvalidRequest(field, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, value, "text that has a UTF-8 form") from error
    return value


def read_flag(item: Mapping[str, Any], field: str) -> bool:
    """A field that is true or false; false if it is not given.

    Raises:
        InvalidRequest: it is neither.
    """
    value = item.get(field, False)
    if not isinstance(value, bool):
        raise InvalidRequest(field, value, "true or false")
    return value


def _text(value: object, field: str, ids: bool, pairs: bool) -> Text:
    if isinstance(value, str):
        return read_text(value, field)
    allowed = "text" + ", or token ids" * ids + ", or two texts" * pairs
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise InvalidRequest(field, value, allowed)
    if pairs and len(value) == 2 and isinstance(value[0], str):
        return read_text(value[0], f"{field}[0]"), read_text(value[1], f"{field}[1]")
    if ids and all(type(token) is int and token >= 0 for token in value):
        return list(value)
    raise InvalidRequest(field, value, allowed)
