"""The entrances that are fuzzed: for each, how a case is made and what must hold for it.

A case that raises anything but its refusal is a crash. Every target has a neighbour: something
valid that goes the same way, and must come out the same after every batch.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from fuzz import generators as make

from penstock.producer.reading.merge import Merger
from penstock.shared.errors import (
    ConfigurationError,
    InvalidRequest,
    ProtocolError,
    StreamError,
)
from penstock.shared.protocol.event_reader import unpack_event, unpack_letter
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.plain_entry import Admission, Entry, read_entry
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason
from penstock.shared.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "gpu_worker/demo_model/target"
MAX_MESSAGE = 1200


def check_refusal(message: str, most: int = MAX_MESSAGE) -> None:
    """One printable line of bounded length."""
    assert message.isprintable()
    assert 0 < len(message) <= most
    message.encode()


class Target(ABC):
    """One entrance."""

    batch = 500
    """Cases between two looks at the neighbour."""

    def open(self) -> None:  # noqa: B027  most need nothing
        """Get ready, in the process that runs the cases."""

    def close(self) -> None:  # noqa: B027
        """Give back what :meth:`open` took."""

    @abstractmethod
    def case(self, dice: random.Random) -> Any:
        """Make a case."""

    @abstractmethod
    def run(self, case: Any) -> None:
        """Send it in; raises if it escapes."""

    def check_neighbour(self) -> None:  # noqa: B027
        """Raise unless the valid one is as before."""

    def run_batch(self, cases: list[tuple[int, Any]], began: list[int]) -> None:
        """Send in many; ``began`` shows the case that runs, for whoever finds it hanging."""
        for number, case in cases:
            began[0] = number
            self.run(case)
        self.check_neighbour()


class Payloads(Target):
    """Packed requests."""

    neighbour = Request.build(id="n", prompt="Hello", stop=["x"], logit_bias={"5": 1.0})

    def case(self, dice: random.Random) -> bytes:
        return make.payload(dice)

    def run(self, case: bytes) -> None:
        try:
            request = Request.unpack(case)
        except InvalidRequest as error:
            check_refusal(str(error))
        else:
            assert Request.unpack(request.pack()) == request

    def check_neighbour(self) -> None:
        assert Request.unpack(self.neighbour.pack()) == self.neighbour


class Entries(Target):
    """Entries of the ingress."""

    def case(self, dice: random.Random) -> tuple[str | None, list[bytes]]:
        return dice.choice((None, "acme")), make.entry_parts(dice)

    def run(self, case: tuple[str | None, list[bytes]]) -> None:
        tenant, parts = case
        verdict = read_entry(Entry(tenant, "1700000000000-0", parts))
        if isinstance(verdict, Admission):
            assert Request.unpack(verdict.payload) == verdict.request
            answered_at = verdict.request.id
        else:
            check_refusal(verdict.message)
            answered_at = verdict.id
        assert tenant is None or answered_at.startswith(f"{tenant}.")
        Request(id=answered_at, prompt="x")

    def check_neighbour(self) -> None:
        parts = [b"id", b"n", b"prompt", b"Hello", b"max_tokens", b"4"]
        verdict = read_entry(Entry(None, "1-1", parts))
        assert isinstance(verdict, Admission)
        assert verdict.request == Request.build(id="n", prompt="Hello", max_tokens=4)


class Values(Target):
    """Values that a program gives to the client."""

    def case(self, dice: random.Random) -> dict[str, Any]:
        fields = make.fields(dice)
        for name in ("prompt_ids", "messages"):
            fields.pop(name, None)
        return {"id": "a", "prompt": "x", **fields}

    def run(self, case: dict[str, Any]) -> None:
        try:
            Request.build(**case)
        except InvalidRequest as error:
            check_refusal(str(error))


EVENTS = [
    [0, [299, 265], " is a", 461606752],
    [0, [1], "", 3, [[-0.5, [[1, -0.5]]]], None, [[0, 0, 1, "x", None]], None],
    [-1, 2, "completed", "length", "", {"prompt_tokens": 3, "attempts": 1}],
]
_EVENT_NAMES = ("start", "ids", "text", "digest", "logprobs", "lengths", "parts", "prompt_logprobs")


def event(dice: random.Random) -> bytes:
    """A chunk or an end with one part exchanged, as msgpack or JSON."""
    valid = dice.choice(EVENTS)
    at = dice.randrange(9)
    changed = [*valid[:at], make.value(dice), *valid[at + 1 :]]
    if dice.random() < 0.5:
        return make.mutated(dice, make.packed(changed))
    shown = make.json_text(dict(zip(_EVENT_NAMES, changed, strict=False)))
    return make.mutated(dice, shown.encode("utf-8", "surrogatepass"))


class Events(Target):
    """Chunks and ends, from a log, a channel or an inbox."""

    def case(self, dice: random.Random) -> bytes:
        return event(dice)

    def run(self, case: bytes) -> None:
        for read in (unpack_event, unpack_letter):
            try:
                read(case)
            except ProtocolError as error:
                check_refusal(str(error))


class Readers(Target):
    """A reader whose channel repeats, loses, reorders, cuts and forges what the log holds.

    What it yields is the stream, token by token and text by text, or it ends with an error.
    """

    ids = tuple(range(100, 124))

    def open(self) -> None:
        self.text = "".join(f"{token}." for token in self.ids)

    def _chunk(self, start: int, stop: int) -> Chunk:
        text = "".join(f"{token}." for token in self.ids[start:stop])
        return Chunk(start, self.ids[start:stop], text, rolling_digest(self.ids[:stop]))

    def case(self, dice: random.Random) -> list[bytes]:
        bounds = sorted({0, len(self.ids), *(dice.randrange(24) for _ in range(6))})
        whole = [self._chunk(a, b).pack() for a, b in itertools.pairwise(bounds)]
        whole.append(End(n=len(self.ids), reason=Reason.LENGTH).pack())
        sent = list(whole)
        for _ in range(dice.randrange(6)):
            way, at = dice.randrange(5), dice.randrange(len(sent))
            if way == 0:
                sent.pop(at)
                sent = sent or list(whole)
            elif way == 1:
                sent.insert(at, dice.choice(whole))
            elif way == 2:
                sent.insert(at, event(dice))
            elif way == 3:
                start = dice.randrange(23)
                sent.insert(at, self._chunk(start, dice.randrange(start + 1, 25)).pack())
            else:
                sent[at] = make.mutated(dice, sent[at])
        return sent + whole

    def run(self, case: list[bytes]) -> None:
        merger, tokens, text = Merger("x"), list[int](), ""
        for data in case:
            try:
                found = unpack_event(data)
                merger.add(found)
            except ProtocolError as error:
                check_refusal(str(error))
                continue
            except (StreamError, InvalidRequest) as error:
                check_refusal(str(error))
                return
            for chunk in merger.ready:
                assert chunk.start == len(tokens)
                tokens += chunk.token_ids
                text += chunk.text
            merger.ready.clear()
            if merger.end is not None:
                assert merger.end.n == len(tokens)
                return


class SettingsTrees(Target):
    """Settings from flags, the environment and a file."""

    batch = 200

    def open(self) -> None:
        self.names = [
            f"{section}.{name}"
            for section, values in Settings().model_dump(mode="json").items()
            for name in values
        ]
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz"))

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def case(self, dice: random.Random) -> tuple[dict[str, Any], dict[str, str], str]:
        flags = {self._name(dice): make.value(dice) for _ in range(dice.randrange(3))}
        environment = {
            f"PENSTOCK_{self._name(dice).upper().replace('.', '__')}": str(dice.choice(
                ("", "1", "-1", "1e400", "true", "off", "auto", "9" * 5000, "512MiB", "\n",
                 "\ud800")
            ))
            for _ in range(dice.randrange(3))
        }  # fmt: skip
        section, _, name = self._name(dice).partition(".")
        lines = f"[{section}]\n{name} = {make.json_text(make.value(dice))}\n"
        return flags, environment, lines if dice.random() < 0.3 else ""

    def _name(self, dice: random.Random) -> str:
        return dice.choice(self.names) if dice.random() < 0.95 else make.text(dice)

    def run(self, case: tuple[dict[str, Any], dict[str, str], str]) -> None:
        flags, environment, lines = case
        file = self.folder / "penstock.toml"
        file.write_bytes(lines.encode("utf-8", "surrogatepass"))
        try:
            load_settings(flags, config=file, environment=environment)
        except ConfigurationError as error:
            check_refusal(str(error), most=4000)

    def check_neighbour(self) -> None:
        assert load_settings({"queue.shard": 3}, environment={}).queue.shard == 3


class Checkpoints(Target):
    """The JSON files of a checkpoint, and the header of its weights."""

    batch = 20

    def open(self) -> None:
        from penstock.gpu_worker.model.loading.checkpoint import quiet

        self.folder = Path(tempfile.mkdtemp(prefix="fuzz"))
        self.files = ("config.json", "tokenizer_config.json", "generation_config.json")
        self.base = {name: json.loads((DEMO / name).read_text()) for name in self.files}
        for file in DEMO.iterdir():
            (self.folder / file.name).write_bytes(file.read_bytes())
        self._quiet = quiet()
        self._quiet.__enter__()

    def close(self) -> None:
        self._quiet.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def case(self, dice: random.Random) -> tuple[str, bytes]:
        name = dice.choice(self.files)
        shown = make.json_text(make.tree(dice, self.base[name]))
        return name, make.mutated(dice, shown.encode("utf-8", "surrogatepass"))

    def run(self, case: tuple[str, bytes]) -> None:
        from penstock.gpu_worker.model.loading.checkpoint import load_config, load_tokenizer
        from penstock.gpu_worker.model.loading.fingerprint import fingerprint_of
        from penstock.shared.errors import ModelError

        name, data = case
        original = (self.folder / name).read_bytes()
        (self.folder / name).write_bytes(data)
        try:
            fingerprint_of(self.folder, "float32")
            load_config(self.folder)
            if name != "config.json":
                load_tokenizer(self.folder)
        except ModelError as error:
            check_refusal(str(error), most=4000)
        finally:
            (self.folder / name).write_bytes(original)

    def check_neighbour(self) -> None:
        from penstock.gpu_worker.model.loading.checkpoint import load_config

        assert load_config(self.folder).model_type == self.base["config.json"]["model_type"]


SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 9},
        "b": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 40},
        "c": {"anyOf": [{"type": "null"}, {"enum": ["x", 1, None]}, {"const": 5}]},
        "d": {"type": "number", "minimum": 1, "maximum": 1e9, "multipleOf": 0.5},
    },
    "$defs": {"d": {"type": "object", "properties": {"e": {"$ref": "#/$defs/d"}}}},
}  # fmt: skip
GRAMMAR = 'start: a ("," a)*\na: /[a-z]+/ | "(" start ")" | b{2,5}\nb: "x"? | <[5]>\n'
REGEX = r"(a|b)*[^c-e]{2,30}(?:xy?z+)\d{1,3}\w*"


class Constraints(Target):
    """Schemas, grammars, regexes, choices and templates, through the sandbox."""

    batch = 40

    def open(self) -> None:
        from penstock.gpu_worker.model.structured.compile_sandbox import CompileSandbox

        tokenizer = (DEMO / "tokenizer.json").read_text()
        self.sandbox = CompileSandbox(tokenizer, 4096, [0], limit_s=5.0)

    def close(self) -> None:
        self.sandbox.close()

    def case(self, dice: random.Random) -> tuple[str, Any]:
        field = dice.choice(("json_schema", "grammar", "regex", "choice", "chat_template"))
        if field == "json_schema":
            return field, make.json_text(make.tree(dice, SCHEMA))
        if field == "choice":
            return field, [make.text(dice) for _ in range(dice.randrange(5))]
        text = {"grammar": GRAMMAR, "regex": REGEX}.get(
            field, "{% for m in messages %}{{ m }}{% endfor %}"
        )
        data = bytes(text.encode())
        for _ in range(dice.randrange(1, 4)):
            data = make.mutated(dice, data)
        return field, data.decode("utf-8", "replace")

    def run(self, case: tuple[str, Any]) -> None:
        from penstock.gpu_worker.model.structured.matcher import ConstraintError

        try:
            self.sandbox.check(*case)
        except ConstraintError as error:
            check_refusal(" ".join(str(error).split()), most=100_000)

    def check_neighbour(self) -> None:
        self.sandbox.check("json_schema", json.dumps(SCHEMA))
