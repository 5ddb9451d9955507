"""The requests of a storm, drawn from a seed, and the expected output of each."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.producer.client import Producer
from penstock.shared.protocol.events import rolling_digest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Lane, Reason
from penstock.shared.synthetic import synthetic_tokens

from ..checks.storm_counts import Ended, Findings

__all__ = ["Case", "Expected", "Oracle", "RecordedOracle", "SyntheticOracle", "Workload"]

_LANES = (Lane.CRITICAL, Lane.NORMAL, Lane.BATCH)
_TENANTS = 6
_LONG_MS = 180_000
"""Deadline of a request that must be completed under every fault."""

_DEMO_PROMPTS = (
    "The list type", "def parse(", "Return the name of", "class Queue", "A file object",
    "Exceptions are", "import os", "The value of",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expected:
    """The output of an undisturbed worker.

    Attributes:
        token_ids: the whole output.
        text: its text.
        reason: why it ends.
        prompt_tokens: tokens of its prompt.
    """

    token_ids: tuple[int, ...]
    text: str
    reason: Reason
    prompt_tokens: int


class Oracle(Protocol):
    """Draws requests whose right output it knows."""

    def draw(self, rng: random.Random, request_id: str) -> dict[str, Any]:
        """Prompt and sampling options of one request."""

    def expect(self, request: Request) -> Expected:
        """The right output of a drawn request."""


class SyntheticOracle:
    """Computes the output: the synthetic model is a pure function.

    Args:
        tokens: output tokens at most.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def draw(self, rng: random.Random, request_id: str) -> dict[str, Any]:
        """A prompt of text or token ids and a number of tokens, some with a stop string."""
        del request_id
        letters = rng.choices(string.ascii_lowercase + " ", k=rng.randint(1, 80))
        prompt: object = "".join(letters)
        if rng.random() < 0.3:
            prompt = [ord(letter) for letter in letters]
        drawn: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": rng.randint(max(1, self._tokens // 3), self._tokens),
        }
        if rng.random() < 0.5:
            drawn["seed"] = rng.getrandbits(63)
        if rng.random() < 0.15:
            # Two letters appear somewhere in most outputs, three in few.
            length = rng.choice((2, 2, 3))
            drawn["stop"] = ["".join(rng.choices(string.ascii_lowercase, k=length))]
        return drawn

    def expect(self, request: Request) -> Expected:
        """Compute the output; the token that completes a stop string ends it."""
        prompt = request.prompt
        assert isinstance(prompt, str) or isinstance(prompt[0], int)
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
        tokens = synthetic_tokens(request.seed, ids, request.options.max_tokens)
        text = "".join(map(chr, tokens))
        for stop in request.options.stop:
            at = text.find(stop)
            if at >= 0:
                return Expected(tokens[: at + len(stop)], text[:at], Reason.STOP, len(ids))
        return Expected(tokens, text, Reason.LENGTH, len(ids))


class RecordedOracle:
    """Knows outputs recorded from an undisturbed worker, for real models.

    Args:
        tokens: output tokens at most.
        variants: number of different requests.
    """

    def __init__(self, tokens: int, variants: int = 16) -> None:
        self._tokens = tokens
        self._variants = variants
        self._known: dict[tuple[object, ...], Expected] = {}

    def variants(self) -> list[dict[str, Any]]:
        """All requests that it draws: greedy and sampled ones."""
        return [
            {
                "prompt": _DEMO_PROMPTS[number % len(_DEMO_PROMPTS)],
                "max_tokens": max(1, self._tokens - number),
                "temperature": 0.0 if number % 2 else 0.9,
                "top_p": 0.95,
                "seed": number,
                "ignore_eos": True,
            }
            for number in range(self._variants)
        ]

    def draw(self, rng: random.Random, request_id: str) -> dict[str, Any]:
        """One of :meth:`variants`."""
        del request_id
        return dict(rng.choice(self.variants()))

    def learn(self, request: Request, expected: Expected) -> None:
        """Store an undisturbed output as the right one."""
        self._known[_output_key(request)] = expected

    async def record(self, producer: Producer, findings: Findings) -> None:
        """Generate every variant on undisturbed workers, and learn its output.

        Raises:
            RequestFailed: a variant was not completed.
        """
        for number, variant in enumerate(self.variants()):
            request = Request.build(id=f"recorded-{number}", **variant)
            await producer.submit(**request_fields(request))
            result = await producer.result(request.id)
            usage = result.usage
            assert usage is not None
            findings.ended[request.id] = Ended(
                result.end, rolling_digest(result.token_ids), request.lane.value, request.tenant
            )
            self.learn(
                request,
                Expected(result.token_ids, result.text, result.reason, usage.prompt_tokens),
            )

    def expect(self, request: Request) -> Expected:
        """The learned output."""
        return self._known[_output_key(request)]


def _output_key(request: Request) -> tuple[object, ...]:
    return request.prompt, request.options, request.seed


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what the storm does with it.

    Attributes:
        request: the request.
        expected: the output of an undisturbed worker.
        duplicates: further concurrent submits of it.
        conflicts: whether its id is submitted with another payload, too.
        cancel_after_s: when it is cancelled; None: never.
        may_expire: its deadline or its maximum queue time is short.
        returning: number of readers that leave and return.
        jumping: number of readers that begin at an index, perhaps past the end.
        slow: whether it has a slow reader.
        seed: of random choices while it runs.
    """

    request: Request
    expected: Expected
    duplicates: int
    conflicts: bool
    cancel_after_s: float | None
    may_expire: bool
    returning: int
    jumping: int
    slow: bool
    seed: str

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id


class Workload:
    """Draws cases; the same seed and number give the same case.

    Args:
        oracle: draws prompts and knows the right outputs.
        seed: of the storm.
        typical_s: typical duration of a request; cancels and deadlines fall into it.
        slow: whether there are slow readers.
    """

    def __init__(self, oracle: Oracle, seed: int, typical_s: float, *, slow: bool) -> None:
        self._oracle = oracle
        self._seed = seed
        self._typical_s = typical_s
        self._slow = slow

    def case(self, number: int) -> Case:
        """The case with this number."""
        seed = f"{self._seed}/{number}"
        rng = random.Random(seed)
        request_id = f"c{number}"
        limits: dict[str, int] = {"deadline_ms": _LONG_MS}
        fate = rng.random()
        if fate < 0.05:
            limits["deadline_ms"] = self._some_ms(rng)
        elif fate < 0.1:
            limits["max_queue_ms"] = self._some_ms(rng) // 8 + 1
        cancelled = 0.1 <= fate < 0.18
        request = Request.build(
            id=request_id,
            lane=rng.choices(_LANES, weights=(1, 3, 1))[0],
            tenant=f"tenant-{int(rng.triangular(0, _TENANTS, 0))}",
            **limits,
            **self._oracle.draw(rng, request_id),
        )
        return Case(
            request=request,
            expected=self._oracle.expect(request),
            duplicates=rng.choices((0, 1, 3), weights=(85, 12, 3))[0],
            conflicts=rng.random() < 0.05,
            cancel_after_s=self._some_ms(rng) / 1000 if cancelled else None,
            may_expire=fate < 0.1,
            returning=int(rng.random() < 0.3),
            jumping=int(rng.random() < 0.15),
            slow=self._slow and rng.random() < 0.4,
            seed=seed,
        )

    def _some_ms(self, rng: random.Random) -> int:
        return 1 + int(rng.uniform(0.0, 1.5) * self._typical_s * 1000)


def changed_payload(request: Request) -> dict[str, Any]:
    """Fields of another request under the same id."""
    return {"prompt": "another payload", "max_tokens": request.options.max_tokens}


def request_fields(request: Request) -> dict[str, Any]:
    """A request as arguments of the client's ``submit``."""
    options = request.options
    fields: dict[str, Any] = {
        "prompt": request.prompt,
        "id": request.id,
        "lane": request.lane,
        "tenant": request.tenant,
        "deadline_ms": request.deadline_ms,
        "max_queue_ms": request.max_queue_ms,
    }
    names: Sequence[str] = (
        "max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_token_ids",
        "ignore_eos",
    )  # fmt: skip
    return fields | {name: getattr(options, name) for name in names}
