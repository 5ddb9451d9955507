"""The page of the protocol says what is: closed sets, keys, scripts and bytes against the code."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from unit.pages import DOCS, ROOT, code, table

from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import GROUP, Keys
from penstock.shared.protocol.chat.chat_options import ChatOptions
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.fields.option_reference import render_options
from penstock.shared.protocol.request import REQUEST_OPTIONS, Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Answer, Lane, Reason, State
from penstock.shared.scripts.operations import RetryPolicy
from penstock.shared.scripts.script_loader import load_script, script_names

PROTOCOL = (DOCS / "protocol.md").read_text("utf-8")


# -- protocol.md: the closed sets ------------------------------------------------------------------


def test_states_and_reasons_are_the_closed_set() -> None:
    rows = table(PROTOCOL, "State", "Reason")
    assert [(code(r[0]), code(r[1])) for r in rows] == [
        (reason.state.value, reason.value) for reason in Reason
    ]
    assert f"`{State.QUEUED}` → `{State.RUNNING}` → one of five terminal states" in PROTOCOL


def test_request_fields() -> None:
    assert [code(row[0]) for row in table(PROTOCOL, "Field", "Type", "Range")] == [
        "v", "id", "prompt", "payload",
    ]  # fmt: skip
    names = {f.name for kind in (Request, SamplingOptions, ChatOptions) for f in fields(kind)}
    given = {"id", "prompt", "payload", "options", "chat"}
    assert {item.name for item in REQUEST_OPTIONS} == names - given


def test_the_reference_of_the_options_is_written_from_their_declarations() -> None:
    assert (DOCS / "options.md").read_text("utf-8") == render_options()


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", 131_072, 131_073),
        ("temperature", 10, 10.1),
        ("top_k", 2_147_483_647, 2_147_483_648),
        ("top_p", 1, 0),
        ("min_p", 1, 1.1),
        ("accept_threshold", 0.999, 1),
        ("speculation", "ngram", "always"),
        ("seed", 2**63 - 1, 2**63),
        ("deadline_ms", 604_800_000, 604_800_001),
        ("max_queue_ms", 1, 0),
        ("stop", ["x" * 256] * 16, ["x" * 257]),
        ("stop", ["x"], ["x"] * 17),
        ("stop_token_ids", [1] * 64, [1] * 65),
        ("prompt", [1] * 262_144, [1] * 262_145),
        ("tenant", "t" * 64, "t" * 65),
        ("id", "i" * 128, "i" * 129),
    ],
)
def test_ranges_are_as_documented(field: str, good: Any, bad: Any) -> None:
    Request.build(**{"id": "x", "prompt": "x", field: good})
    with pytest.raises(InvalidRequest, match=rf"^{field}\b"):
        Request.build(**{"id": "x", "prompt": "x", field: bad})


def test_keys_are_those_of_the_code() -> None:
    documented = {code(row[0]) for row in table(PROTOCOL, "Key", "Type")}
    keys = Keys("demo", 0)
    assert keys.prefix == "ps:{demo.0}:"
    lane = {lane.value: "<lane>" for lane in Lane}
    built = {
        keys.request("<id>"), keys.log("<id>"), keys.channel("<id>"), keys.continued(Lane.NORMAL),
        keys.inbox("<inbox>"),
        keys.suspects, keys.lanes, keys.virtual_time, keys.sweep, keys.leases,
        keys.owned("<worker>"),
        keys.deadlines, keys.readers, keys.counters, keys.bell, keys.dead_letters,
        keys.queue(Lane.NORMAL, "<tenant>"), keys.tenants(Lane.NORMAL), keys.ingress_tenants,
        keys.ingress(), keys.ingress("<tenant>"), keys.ended, keys.compacting("<id>"),
        keys.fingerprints, keys.model_card, keys.usage(0).replace(":0", ":<day>"),
        keys.continued(Lane.NORMAL) + ":<fingerprint>", keys.suspects + ":<fingerprint>",
    }  # fmt: skip
    names = set()
    for name in built:
        short = name.removeprefix(keys.prefix)
        for value, shown in lane.items():
            short = re.sub(rf"\b{value}\b", shown, short)
        names.add(short)
    assert documented == names
    assert f"stream + group `{GROUP}`" in PROTOCOL


def test_scripts_and_which_of_them_run_at_maxmemory() -> None:
    documented = {code(row[0]): row[2] for row in table(PROTOCOL, "Script", "What it does")}
    assert documented.keys() == set(script_names()) - {"probe"}
    for name, at_maxmemory in documented.items():
        script = load_script(name)
        runs = "\nallow_oom()\n" in script.source or "then allow_oom() end" in script.source
        assert runs == script.header.runs_at_maxmemory, name
        assert at_maxmemory == ("runs" if runs else "refused"), name


def test_key_types_are_those_of_the_headers() -> None:
    types = {code(row[0]): row[1] for row in table(PROTOCOL, "Key", "Type")}
    words = {"zset": "sorted set"}
    for name in script_names():
        for key in load_script(name).header.keys:
            shown = re.sub(r"<(own_id|ids)>", "<id>", key.template)
            shown = re.sub(r":(critical|normal|batch)$", ":<lane>", shown)
            if shown != "<ingress>":
                assert types[shown].startswith(words.get(key.kind, key.kind)), (name, shown)


def test_keys_and_arguments_of_submit_are_those_of_its_header() -> None:
    header = load_script("submit").header
    keys = [code(row[1]) for row in table(PROTOCOL, "KEYS")]
    assert keys == [key.template for key in header.keys]
    assert f"EVALSHA <sha1 of the source> {len(keys)} <keys> <arguments>" in PROTOCOL
    rows = table(PROTOCOL, "ARGV", "Name", "Type")
    assert [code(row[1]) for row in rows] == [argument.name for argument in header.arguments]
    for row, argument in zip(rows, header.arguments, strict=True):
        shown = "|".join(row[2].replace("`", "").replace("empty", "").split(", "))
        assert shown == argument.kind, argument.name


def test_acl_examples_grant_what_the_scripts_run() -> None:
    scripts = [load_script(name).header for name in script_names()]
    for role, direct in (("producer", {"hmget", "xrange"}), ("worker", {"hmget", "xread"})):
        (rules,) = re.findall(rf"^ACL SETUSER {role} (.*)$", PROTOCOL, re.MULTILINE)
        granted = set(re.findall(r"\+(\w+)", rules))
        needed = {c.lower() for header in scripts if header.role == role for c in header.commands}
        assert needed | direct <= granted, role
        connection = {"ping", "info", "eval", "evalsha", "subscribe", "unsubscribe"}
        assert granted <= needed | direct | connection, role


def test_digest_in_the_transcript_is_that_of_the_request() -> None:
    request = Request.build(id="hello", prompt="The list type", max_tokens=4, temperature=0.0)
    values = transcript_values("HGETALL")
    record = dict(zip(values[::2], values[1::2], strict=True))
    assert record[b"digest"] == hashlib.sha256(request.pack()).digest()[:16]


def test_limits_of_retries() -> None:
    policy = RetryPolicy()
    rows = {code(row[1]): row[2] for row in table(PROTOCOL, "State", "Reason")}
    assert rows["poison"].startswith(f"{policy.max_blames} workers in a row")
    assert rows["attempts"].startswith(f"{policy.max_attempts} workers in all")


# -- protocol.md: bytes ----------------------------------------------------------------------------


def test_digest_vectors() -> None:
    rows = table(PROTOCOL, "Output ids")
    assert len(rows) >= 4
    for ids, decimal, hexadecimal in rows:
        digest = rolling_digest(json.loads(code(ids)))
        assert (digest, f"{digest:08x}") == (int(decimal), code(hexadecimal))
    assert rolling_digest([821, 408], rolling_digest([299, 265])) == 3245392340


def _bytes(cell: str) -> bytes:
    return bytes.fromhex(code(cell))


def test_request_bytes() -> None:
    for shown, packed in table(PROTOCOL, "Request", "msgpack"):
        wire = json.loads(code(shown))
        assert msgpack.packb(wire) == _bytes(packed)
        request = Request.unpack(_bytes(packed))
        wire.pop("v")
        assert request == Request.build(**wire)
        assert request.pack() == _bytes(packed)


def test_event_bytes() -> None:
    kinds = set()
    for shown, packed in table(PROTOCOL, "Event", "msgpack"):
        assert msgpack.packb(json.loads(code(shown))) == _bytes(packed)
        event = unpack_event(_bytes(packed))
        assert event.pack() == _bytes(packed)
        kinds.add(type(event))
    assert kinds == {Chunk, End}


def test_json_events_say_the_same() -> None:
    for shown, same in table(PROTOCOL, "JSON", "the same as"):
        event = unpack_event(msgpack.packb(json.loads(code(same))))
        assert event.pack(Answer.JSON).decode() == code(shown)
        assert unpack_event(code(shown).encode()) == event


def test_captured_json_answer_is_one_whole_stream() -> None:
    section = PROTOCOL[PROTOCOL.index("## Ingress") :]
    entries = re.findall(r'^ +2\) "(\{.*\})"$', section, re.MULTILINE)
    chunk, end = (unpack_event(ast.literal_eval(f'b"{entry}"')) for entry in entries)
    assert isinstance(chunk, Chunk)
    assert isinstance(end, End)
    assert chunk.digest == rolling_digest(chunk.token_ids)
    assert (chunk.start, chunk.stop) == (0, end.n)


def transcript_values(command: str) -> list[bytes]:
    """The strings that redis-cli shows in the first capture of a command."""
    block, *_ = re.findall(rf"```console\n\$ redis-cli [^\n]*\b{command}\b(.*?)```", PROTOCOL, re.S)
    shown = re.findall(r'"(?:[^"\\]|\\.)*"', block.partition("\n")[2])
    return [ast.literal_eval(f"b{text}") for text in shown]


@pytest.mark.parametrize("command", ["SUBSCRIBE", "XRANGE"])
def test_captured_events_are_one_whole_stream(command: str) -> None:
    packed = [value for value in transcript_values(command) if value[:1] in (b"\x94", b"\x96")]
    *chunks, end = map(unpack_event, packed)
    ids: list[int] = []
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        assert chunk.start == len(ids)
        ids += chunk.token_ids
        assert chunk.digest == rolling_digest(ids)
    assert isinstance(end, End)
    assert end.n == len(ids) == 4
    text = "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))
    assert f"{text}\ncompleted (length), 3 prompt + 4 output tokens" in PROTOCOL


def test_captured_log_entries_are_named_by_token_count() -> None:
    values = transcript_values("XRANGE")
    for entry, field, packed in zip(values[::3], values[1::3], values[2::3], strict=True):
        event = unpack_event(packed)
        if isinstance(event, Chunk):
            assert (entry.decode(), field) == (f"{event.stop}-0", b"chunk")
        else:
            assert (entry.decode(), field) == (f"{event.n}-1", b"end")
    assert values[2::3] == [
        v for v in transcript_values("SUBSCRIBE") if v[:1] in (b"\x94", b"\x96")
    ]


def test_captured_record_is_the_one_of_these_events() -> None:
    values = transcript_values("HGETALL")
    record = dict(zip(values[::2], values[1::2], strict=True))
    assert record[b"end"] == transcript_values("XRANGE")[-1]
    assert (record[b"state"], record[b"tokens"]) == (b"completed", b"4")
    source = (ROOT / "shared/scripts/lua/lib/finish.lua").read_text("utf-8")
    described = source.partition("local FIELDS")[0]
    for field in [*(name.decode() for name in record), *stable_fields()]:
        assert re.search(rf"\b{field}\b", described), field


def stable_fields() -> list[str]:
    names: list[str] = []
    for row in table(PROTOCOL, "Field", "Meaning"):
        names += re.findall(r"`(\w+)`", row[0])
    return names
