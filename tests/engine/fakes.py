"""A model without a device, whose KV memory remembers what was written into it."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.kv.kv_cache_groups import NO_BLOCK, KVCacheGroup
from penstock.gpu_worker.engine.kv.kv_manager import KVManager
from penstock.gpu_worker.engine.output.step_output import StepOutput, StepTiming
from penstock.gpu_worker.engine.plan import BlockCopy, Plan, Span
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.sequence import Sequence, SequenceStatus
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

EOS = 0
# Multi-character tokens, halves of "é", and a continuation byte that may come alone.
PIECES = (b"", b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"aab", b" ")


def config(**changes: object) -> EngineConfig:
    """A small, roomy engine; tests change what they are about."""
    values: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_batch_tokens": 32,
        "max_sequences": 8,
        "chunk_size": 16,
        "max_model_len": 64,
        "eos_token_ids": frozenset({EOS}),
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def kv_manager(cfg: EngineConfig) -> KVManager:
    """The manager that an engine with this configuration makes."""
    return KVManager(
        cfg.kv_cache_groups,
        cfg.block_size,
        prefix_cache=cfg.prefix_cache,
        max_span=cfg.max_span,
    )


def request(
    id: str,
    prompt_ids: Iterable[int] = (1, 2, 3),
    *,
    lane: Lane = Lane.NORMAL,
    tenant: str = "default",
    output_ids: Iterable[int] = (),
    arrival: float = 0.0,
    deadline: float | None = None,
    choice_ids: Iterable[Iterable[int]] = (),
    **options: object,
) -> EngineRequest:
    """A request with ``ignore_eos``, so that directed tests end when they say so."""
    return EngineRequest(
        id=id,
        lane=lane,
        tenant=tenant,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        choice_ids=tuple(map(tuple, choice_ids)),
        options=SamplingOptions(**{"ignore_eos": True, **options}),  # type: ignore[arg-type]
        seed=0,
        arrival=arrival,
        deadline=deadline,
    )


class PieceStream:
    """Detokenises ids over ``PIECES``, holding back halves of characters."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(PIECES[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def decode(token_ids: Iterable[int], *, final: bool) -> str:
    data = b"".join(PIECES[token_id] for token_id in token_ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def prompt_report(token_id: int) -> TokenLogprobs:
    """What the fake model reports of a prompt's token."""
    return TokenLogprobs(-float(token_id))


def cut(text: str, stops: Iterable[str]) -> str | None:
    """What stands before the stop string that is complete first; None if there is none."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else None


def tag_after(tag: int, token_id: int) -> int:
    """What the fake model stores for a token: a name of the token and all tokens before it."""
    return hash((tag, token_id))


def tags(token_ids: Iterable[int], salt: bytes = b"") -> list[int]:
    tag, result = hash(tuple(salt)), []
    for token_id in token_ids:
        tag = tag_after(tag, token_id)
        result.append(tag)
    return result


def next_token(tag: int, choice: int = 0) -> int:
    """The model: the next token as a function of what is stored for the last one.

    Choices stand for different random numbers.
    """
    return ((tag >> 7) + choice * (tag >> 12)) % len(PIECES)


def likelihoods(tag: int) -> list[tuple[int, float]]:
    """The model for beam search: all tokens and their log-probabilities, the likeliest first.

    A quarter's multiples, so that sums are exact whatever the order.
    """
    figures = [(i, -1 - ((tag >> (5 + 3 * i)) & 31) / 4) for i in range(len(PIECES))]
    return sorted(figures, key=lambda pair: -pair[1])


class FakeKV:
    """KV memory: slot -> tag, for each KV cache group. Checks each read as attention would."""

    def __init__(self, block_size: int, groups: Seq[KVCacheGroup] = (KVCacheGroup(0),)) -> None:
        self.block_size = block_size
        self.windows = [group.window for group in groups]
        self.memory: list[dict[int, int]] = [{} for _ in groups]
        self.host: dict[tuple[int, int], dict[int, int]] = {}  # group, block -> offset -> tag

    def slot(self, sequence: Sequence, position: int, group: int) -> int:
        table = sequence.block_tables[group]
        block = table[position // self.block_size]
        assert block != NO_BLOCK, f"{sequence} reaches for {position}, which has left the window"
        return block * self.block_size + position % self.block_size

    def swap(self, plan: Plan) -> None:
        """Out before in; each in whatever order."""
        size = self.block_size
        for copies in (plan.swaps_out, plan.swaps_in):
            targets = {(copy.group, copy.target) for copy in copies}
            assert len(targets) == len(copies), "a target of two swaps"
        written = [(copy.group, copy.target) for copy in (*plan.swaps_in, *plan.copies)]
        assert len(set(written)) == len(written), "what came in is overwritten by a block copy"
        for copy in plan.swaps_out:
            slots = range(copy.source * size, (copy.source + 1) * size)
            memory = self.memory[copy.group]
            self.host[copy.group, copy.target] = {s % size: memory[s] for s in slots if s in memory}
        for copy in plan.swaps_in:
            for offset, tag in self.host[copy.group, copy.source].items():
                self.memory[copy.group][copy.target * size + offset] = tag

    def write(self, sequence: Sequence, position: int, tag: int) -> None:
        for group, memory in enumerate(self.memory):
            memory[self.slot(sequence, position, group)] = tag

    def tag(self, sequence: Sequence, position: int) -> int:
        """What is stored for a position, in all groups alike."""
        (tag,) = {m[self.slot(sequence, position, group)] for group, m in enumerate(self.memory)}
        return tag

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """In order, and all reads before all writes: a plan allows both, so both must agree."""
        copies = list(copies)
        for group in range(len(self.memory)):
            self._copy([copy for copy in copies if copy.group == group], group)

    def _copy(self, copies: Iterable[BlockCopy], group: int) -> None:
        memory = self.memory[group]
        size, gathered, in_order = self.block_size, dict(memory), dict(memory)
        targets: set[int] = set()
        for copy in copies:
            assert copy.target not in targets, "a block is the target of two copies"
            targets.add(copy.target)
            for offset in range(size):
                source, target = copy.source * size + offset, copy.target * size + offset
                gathered[target] = memory.get(source, 0)
                in_order[target] = in_order.get(source, 0)
        assert gathered == in_order
        self.memory[group] = gathered

    def read(self, sequence: Sequence, start: int, stop: int) -> int | None:
        """All that queries at positions ``[start, stop)`` see is of this sequence's own tokens.

        Returns:
            What is stored for the last of them.
        """
        expected = tags(sequence.token_ids[:stop], sequence.cache_salt)
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            slots = [self.slot(sequence, position, group) for position in range(first, stop)]
            found = [self.memory[group].get(slot) for slot in slots]
            assert found == expected[first:], f"{sequence}: the KV of other tokens is in its blocks"
        return expected[-1] if expected else None


def untimed(plan: Plan) -> StepTiming | None:
    """What a step takes, if nobody looks."""
    return None


class FakeRunner:
    """Runs plans over a :class:`FakeKV`; the next token comes from what is stored there.

    Args:
        block_size: of the KV memory.
        groups: of the KV memory.
        timing: what a step takes.
    """

    def __init__(
        self,
        block_size: int,
        groups: Seq[KVCacheGroup] = (KVCacheGroup(0),),
        timing: Callable[[Plan], StepTiming | None] = untimed,
    ) -> None:
        self.kv = FakeKV(block_size, groups)
        self._timing = timing
        self.num_computed = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        self.kv.swap(plan)
        self.kv.copy(plan.copies)
        drafts = {span.sequence: self._drafts(span) for span in plan.spans if span.num_drafts}
        self._write(plan, drafts)
        if meanwhile is not None:
            meanwhile()
        sampled, logprobs, candidates = [], {}, {}
        for span in plan.spans:
            if plan.token_ids and span.sequence.status is SequenceStatus.FINISHED:
                sampled.append((0,))  # it ended meanwhile: this is not looked at
                continue
            # After all spans have written, as in a real forward pass: nobody's writing may have
            # touched what another one reads.
            sequence = span.sequence
            last = self.kv.read(sequence, span.start, span.start + span.num_tokens)
            assert last is not None
            chosen, figures = [], []
            for place, draft in enumerate((*drafts.get(sequence, ()), None)):
                chosen.append(next_token(last, sequence.choice))
                figures.append(TokenLogprobs(dict(likelihoods(last))[chosen[-1]]))
                if draft != chosen[-1]:
                    break
                last = tag_after(last, draft)
                position = span.start + span.num_tokens + place
                assert self.kv.tag(sequence, position) == last, "another has written over a draft"
            self.num_accepted += len(chosen) - 1
            sampled.append(tuple(chosen) if span.samples else ())
            if span.samples and sequence.options.logprobs is not None:
                logprobs[sequence] = tuple(figures)
            if span.samples and sequence.num_candidates:
                candidates[sequence] = tuple(likelihoods(last)[: sequence.num_candidates])
        self.num_computed += plan.num_tokens
        reports = {
            span.sequence: tuple(
                prompt_report(span.sequence.token_ids[row + 1]) for row in span.prompt_rows
            )
            for span in plan.spans
        }
        return StepOutput(
            tuple(sampled),
            logprobs=logprobs,
            candidates=candidates,
            prompt_logprobs=reports,
            drafted={sequence: len(ids) for sequence, ids in drafts.items()},
            timing=self._timing(plan),
        )

    def _drafts(self, span: Span) -> tuple[int, ...]:
        """Those of the plan, or a draft model's: mostly right, and now and then too few."""
        sequence = span.sequence
        assert span.num_tokens == 1
        assert span.samples
        assert not sequence.num_candidates
        assert len(span.drafts) in (0, span.num_drafts)
        drafts = list(span.drafts)
        if not drafts:
            last = tags(sequence.token_ids, sequence.cache_salt)[-1]
            for _ in range(span.num_drafts - (last % 5 == 0)):
                right = next_token(last, sequence.choice)
                drafts.append((right + (last % 4 == 0)) % len(PIECES))
                last = tag_after(last, drafts[-1])
        self.num_drafted += len(drafts)
        return tuple(drafts)

    def _write(self, plan: Plan, drafts: Mapping[Sequence, tuple[int, ...]]) -> None:
        assert plan.spans
        assert len({span.sequence for span in plan.spans}) == len(plan.spans)
        keys = {(span.sequence.id, span.sequence.choice) for span in plan.spans}
        assert len(keys) == len(plan.spans)
        written: set[tuple[int, int]] = set()
        assert len(plan.token_ids) in (0, len(plan.spans))
        for index, span in enumerate(plan.spans):
            sequence, stop = span.sequence, span.start + span.num_tokens
            token_ids = [*sequence.token_ids, *plan.token_ids[index : index + 1]]
            assert plan.token_ids or span.start == sequence.num_computed_tokens
            assert 0 < span.num_tokens <= len(token_ids) - span.start
            assert span.samples == (stop == len(token_ids))
            new = drafts.get(sequence, ())
            known = tags([*token_ids[:stop], *new], sequence.cache_salt)
            for position in range(span.start, stop + len(new)):
                for group in range(len(self.kv.memory)):
                    slot = group, self.kv.slot(sequence, position, group)
                    assert slot not in written, "two sequences write the same slot"
                    written.add(slot)
                self.kv.write(sequence, position, known[position])


@dataclass(frozen=True)
class Result:
    token_ids: tuple[int, ...]
    text: str
    reason: Reason


def solo(req: EngineRequest, cfg: EngineConfig, choice: int = 0) -> Result:
    """What a choice of ``req`` gives alone, by the rules once more and as plainly as possible."""
    salt = req.tenant.encode() if cfg.salt_by_tenant else b""
    options, prompt, out = req.options, list(req.prompt_ids), []
    stop_ids = {*options.stop_token_ids, *(() if options.ignore_eos else cfg.eos_token_ids)}
    while True:
        out.append(next_token(tags([*prompt, *out], salt)[-1], choice))
        if out[-1] in stop_ids:
            return _result(out, decode(out[:-1], final=True), options.stop, Reason.STOP)
        visible = cut(decode(out, final=False), options.stop)
        if visible is not None:
            return Result(tuple(out), visible, Reason.STOP)
        whole = decode(out, final=True)
        if len(out) == options.max_tokens or len(prompt) + len(out) == cfg.max_model_len:
            reason = Reason.LENGTH if cut(whole, options.stop) is None else Reason.STOP
            return _result(out, whole, options.stop, reason)
        if len(prompt) + len(out) > capacity(cfg):
            return _result(out, whole, options.stop, Reason.OUT_OF_MEMORY)


def capacity(cfg: EngineConfig) -> float:
    """Tokens of the longest sequence that fits into its pools, alone."""
    size, most = cfg.block_size, math.inf
    for group in cfg.kv_cache_groups:
        # A window, a step, what a half-filled block keeps, and the begin of the first block.
        span = (group.window or math.inf) - 1 + min(cfg.chunk_size, cfg.max_batch_tokens) + size - 1
        if span + size - 1 > group.num_blocks * size:
            most = min(most, group.num_blocks * size)
    return most


def _result(out: Seq[int], text: str, stops: Iterable[str], reason: Reason) -> Result:
    before = cut(text, stops)
    return Result(tuple(out), text if before is None else before, reason)
