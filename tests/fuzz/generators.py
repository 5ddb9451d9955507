"""Malformed messages by a dice: valid ones with fields exchanged, dropped and added, then bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import msgpack

VALID: dict[str, Any] = {
    "lane": "batch", "tenant": "acme", "deadline_ms": 500, "max_queue_ms": 400, "answer": "json",
    "on_disconnect": "cancel", "max_tokens": 8, "temperature": 0.5, "top_k": 4, "top_p": 0.5,
    "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.5}, "allowed_token_ids": [1, 2], "banned_token_ids": [3],
    "min_tokens": 2, "logprobs": 3, "prompt_logprobs": 2, "seed": 7, "stop": ["a", "b"],
    "stop_token_ids": [4], "ignore_eos": True, "n": 2, "best_of": 3, "speculation": "off",
    "accept_threshold": 0.1, "json_schema": '{"type":"integer"}', "regex": "[0-9]",
    "grammar": 'start: "a"', "choice": ["x", "y"], "beam_width": 2, "length_penalty": 2.0,
    "early_stopping": "never",
}  # fmt: skip

PROMPTS: list[tuple[str, Any]] = [
    ("prompt", "Hello"),
    ("prompt_ids", [5, 6, 7]),
    ("messages", [{"role": "user", "content": "Hello"}]),
]

STRANGE = (
    None, True, False, 0, 1, -1, 7, 10**400, -(10**4000), 2**31, 2**53 + 1, 2**63, 2**64, 0.0,
    -0.0, 0.5, 1e308, float("nan"), float("inf"), "", "a", "\ud800", "\x00", "\n", "\u202e", "true",
    "1e5", "0x1", "\u0661", "k" * 100_000, [], {}, [1], ["a"], {"a": 1}, [[1], 2], {"": []},
)  # fmt: skip

_NAMES = (*VALID, "prompt", "prompt_ids", "messages", "id", "v", "stop_json", "tools", "model")
_DEPTHS = (2, 5, 9, 101, 400)


def value(dice: random.Random, depth: int = 2) -> Any:
    """Any value, sometimes deeply nested."""
    if dice.random() < 0.03:
        inner: Any = 1
        for _ in range(dice.choice(_DEPTHS)):
            inner = {"a": inner} if dice.random() < 0.5 else [inner]
        return inner
    if depth and dice.random() < 0.15:
        items = [value(dice, depth - 1) for _ in range(dice.randrange(4))]
        return items if dice.random() < 0.5 else {text(dice): item for item in items}
    return text(dice) if dice.random() < 0.2 else dice.choice(STRANGE)


def text(dice: random.Random) -> str:
    """A short text of any code points."""
    return "".join(chr(dice.choice((32, 127, 255, 0xD7FF, 0x10FFFF)) - dice.randrange(30))
                   for _ in range(dice.randrange(8)))  # fmt: skip


def fields(dice: random.Random) -> dict[str, Any]:
    """The fields of a valid request, up to three of them replaced, dropped or added."""
    prompt, default = dice.choice(PROMPTS)
    names = dice.sample(list(VALID), dice.randrange(5))
    found = {"id": "a", prompt: default, **{name: VALID[name] for name in names}}
    for _ in range(dice.randrange(4)):
        name = dice.choice(_NAMES) if dice.random() < 0.9 else text(dice)
        found[name] = value(dice)
        if dice.random() < 0.5:
            found.pop(dice.choice(list(found)))
    return found


def payload(dice: random.Random) -> bytes:
    """A packed request."""
    found = fields(dice)
    for name in ("prompt_ids", "messages"):
        if name in found:
            found["prompt"] = found.pop(name)
    return mutated(dice, packed({"v": 1, **found}))


def entry_parts(dice: random.Random) -> list[bytes]:
    """Fields and values of an entry of the ingress."""
    parts: list[bytes] = []
    for name, item in fields(dice).items():
        shown = item if isinstance(item, str) else json_text(item)
        pair = [name.encode("utf-8", "surrogatepass"), shown.encode("utf-8", "surrogatepass")]
        parts += pair * (2 if name in ("stop", "choice") else 1)
    if dice.random() < 0.5:
        parts = [mutated(dice, part) for part in parts]
    return parts


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Half of the time as it is, else damaged."""
    return data if dice.random() < 0.5 else damaged(dice, data, dice.randrange(1, 4))


def damaged(dice: random.Random, data: bytes, times: int) -> bytes:
    """Bytes flipped, dropped, repeated or exchanged, so many times."""
    changed = bytearray(data)
    for _ in range(times):
        at = dice.randrange(len(changed) + 1)
        piece = changed[at : at + dice.randrange(1, 9)]
        way = dice.randrange(4)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        elif way == 1:
            del changed[at : at + len(piece)]
        elif way == 2:
            changed[at:at] = piece * dice.randrange(1, 200)
        else:
            changed[at : at + 1] = dice.randbytes(2)
    return bytes(changed)


def packed(item: Any) -> bytes:
    """As msgpack; empty if it has no such form."""
    try:
        data: bytes = msgpack.packb(item, unicode_errors="surrogatepass")
    except (OverflowError, ValueError):
        return b""
    return data


def json_text(item: Any) -> str:
    """As JSON; many digits for an integer of more than Python writes."""
    try:
        return json.dumps(item)
    except (ValueError, RecursionError):
        return "9" * 5000


def tree(dice: random.Random, base: Any) -> Any:
    """A JSON document with up to three of its values replaced, dropped or moved."""
    found = json.loads(json.dumps(base))
    for _ in range(dice.randrange(1, 4)):
        places = _places(found, [])
        where, key = dice.choice(places)
        way = dice.randrange(4)
        if way == 0 and isinstance(where, dict):
            where.pop(key)
        elif way == 1:
            part, name = dice.choice(places)
            where[key] = copy.deepcopy(part[name]) if name in _keys(part) else 1
        else:
            where[key] = value(dice)
    return found


def _places(node: Any, out: list[tuple[Any, Any]], depth: int = 20) -> list[tuple[Any, Any]]:
    for key in _keys(node):
        out.append((node, key))
        if depth and isinstance(node[key], dict | list):
            _places(node[key], out, depth - 1)
    return out or [({"": 1}, "")]


def _keys(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node))
