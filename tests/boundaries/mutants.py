"""The guards around messages, taken out one by one, in the order of docs/security.md."""

from __future__ import annotations

from boundaries import cases
from boundaries.mutation import Bound, Code, Mutant

from penstock.producer.gateway.access import key_access
from penstock.producer.gateway.serving import request_body
from penstock.producer.reading.merge import Merger
from penstock.shared import quoting
from penstock.shared.protocol import event_reader, parsing, plain_entry, request
from penstock.shared.protocol.fields import collection_types, field_types
from penstock.shared.protocol.request import Request
from penstock.shared.settings import sources

MUTANTS = (
    # request payloads
    Mutant(
        "payloads of any size",
        Code(Request.unpack, "len(payload) > MAX_PAYLOAD_BYTES", "False"), cases.too_large,
    ),
    Mutant(
        "payloads of any version", Code(Request.unpack, "version != PROTOCOL_VERSION", "False"),
        cases.another_version,
    ),
    Mutant(
        "payloads that are no map", Code(Request.unpack, "not isinstance(wire, dict)", "False"),
        cases.no_map,
    ),
    Mutant("any depth", Bound(parsing, "MAX_DEPTH", 10**6), cases.too_deep),
    Mutant(
        "any number of containers", Bound(parsing, "MAX_CONTAINERS", 10**9),
        cases.too_many_containers,
    ),
    Mutant(
        "parser errors that are not named", Bound(parsing, "PARSER_ERRORS", (KeyError,)),
        cases.bytes_that_no_parser_takes,
    ),
    Mutant(
        "unknown fields", Code(Request.build, "raise unknown_field(name, values[name], known)", ""
        "continue"), cases.payload("one of the fields", prompts=1),
    ),
    Mutant(
        "integers out of range",
        Code(field_types.Integer.check, "and self.low <= value <= self.high", ""),
        cases.payload("max_tokens", max_tokens=2**40),
    ),
    Mutant(
        "booleans for integers",
        Code(field_types.Integer.check, "and not isinstance(value, bool)", ""),
        cases.payload("max_tokens", max_tokens=True),
    ),
    Mutant(
        "as many tokens as fit",
        Code(collection_types.TokenIds.check, "not self.min_items <= len(value) <= self.max_items",
             "False"),
        cases.payload("token ids", allowed_token_ids=[1] * 5000),
    ),
    Mutant(
        "token ids of any size",
        Code(collection_types.TokenIds.check, "max(value) > MAX_TOKEN_ID", "False"),
        cases.payload("prompt", prompt=[2**40]),
    ),
    Mutant(
        "as many texts as fit",
        Code(collection_types.Texts.check, "len(value) > self.max_items", "False"),
        cases.payload("stop", stop=["x"] * 100),
    ),
    Mutant(
        "texts that add up",
        Code(collection_types.Texts.check, "size > self.max_total_bytes", "False"),
        cases.payload("in all", choice=[f"{i:03}" + "x" * 1000 for i in range(100)]),
    ),
    # entries of the ingress
    Mutant(
        "entries of any size",
        Code(plain_entry._request_fields, "size > MAX_PAYLOAD_BYTES", "False"),
        cases.entry_too_large,
    ),
    Mutant(
        "another tenant's id",
        Code(plain_entry._own, "entry.tenant is not None and", "False and"),
        cases.entry("begins with acme.", "prompt", "x", "id", "other.1", tenant="acme"),
    ),
    Mutant(
        "a refusal under another tenant's id",
        Code(plain_entry._own, "entry.tenant is not None and", "False and"), cases.foreign_answer,
    ),
    Mutant(
        "another tenant's name",
        Code(plain_entry._request_fields, "if entry.tenant is not None and", "if False and"),
        cases.entry("whose stream this is", "prompt", "x", "tenant", "other", tenant="acme"),
    ),
    Mutant(
        "unknown fields of entries",
        Code(plain_entry._read_values, "if read is None:", "if False:"),
        cases.entry("one of the fields", "prompt", "x", "colour", "1"),
    ),
    Mutant(
        "a field twice", Code(plain_entry._read_values, "elif name in values:", "elif False:"),
        cases.entry("this field once", "prompt", "x", "seed", "1", "seed", "2"),
    ),
    Mutant(
        "bytes that are no text", Code(plain_entry._text, '"utf-8"', '"latin-1"'),
        cases.entry("UTF-8", "prompt", b"\xff"),
    ),
    Mutant(
        "JSON of any depth", Code(parsing.parse_json, "not _is_flat(value, max_depth)", "False"),
        cases.json_too_deep,
    ),
    Mutant(
        "JSON parsers' errors", Bound(parsing, "PARSER_ERRORS", (KeyError,)),
        cases.json_that_no_parser_takes,
    ),
    # quoted values
    Mutant(
        "raw characters", Code(quoting.one_line, "not start.isprintable()", "False"),
        cases.one_printable_line,
    ),
    Mutant(
        "whole lines", Code(quoting.one_line, "len(start) <= max_chars", "True"), cases.short_line,
    ),
    Mutant(
        "all digits", Code(quoting._represent, "type(value) is int and", "False and"),
        cases.many_digits,
    ),
    Mutant(
        "all levels", Code(quoting._represent, "and depth == 0", "and False"), cases.deep_value,
    ),
    Mutant("all items", Bound(quoting, "_MAX_ITEMS", 10**9), cases.wide_value),
    Mutant(
        "a class's own error", Code(quoting._represent, "except Exception:", "except KeyError:"),
        cases.foreign_class,
    ),
    # chunks and ends
    Mutant(
        "chunks of other tokens", Code(Merger._verify, "if self.digest is not None and", "if False "
        "and"), cases.other_tokens,
    ),
    Mutant(
        "chunks behind a gap", Code(Merger.add, "if known < 0:", "if False:"), cases.gap,
    ),
    Mutant(
        "ends of delivered tokens", Code(Merger._add_end, "if end.n < self.index:", "if False:"),
        cases.early_end,
    ),
    Mutant(
        "ends that come too early", Code(Merger._add_end, "if end.n > self.index:", "if False:"),
        cases.late_end,
    ),
    Mutant(
        "an index that is no number",
        Code(event_reader._check_chunk, "type(start) is not int", "False"),
        cases.event(0.5, [1], "x", 3),
    ),
    Mutant(
        "a text that is none", Code(event_reader._check_chunk, "type(text) is not str", "False"),
        cases.event(0, [1], 5, 3),
    ),
    Mutant(
        "a negative index", Code(event_reader._check_chunk, "start < 0", "False"),
        cases.event(-2, [1], "x", 3),
    ),
    Mutant(
        "token ids that are none",
        Code(event_reader._check_chunk, "type(token_id) is not int or", "False or"),
        cases.event(0, [1.5], "x", 3),
    ),
    Mutant(
        "logprobs of other tokens",
        Code(event_reader._logprobs, "len(wire) != num_tokens", "False"),
        cases.event(0, [1, 2], "x", 3, [[-0.5, []]]),
    ),
    Mutant(
        "errors of an event's parser",
        Bound(event_reader, "PARSER_ERRORS", (KeyError,)), cases.event_that_no_parser_takes,
    ),
    Mutant(
        "letters of half a pair", Code(event_reader.unpack_letter, "len(parts) % 2", "False"),
        cases.letter_of_half_a_pair,
    ),
    # constraints; process_mutants.py has the limits of their process
    Mutant(
        "as many biases as fit",
        Code(collection_types.Biases.check, "or len(value) > self.max_items", ""),
        cases.many_biases,
    ),
    Mutant(
        "schemas of any depth", Bound(collection_types, "MAX_SCHEMA_DEPTH", 10**6),
        cases.schema_too_deep,
    ),
    Mutant(
        "schemas that are no object",
        Code(collection_types.JsonSchema.check, "not isinstance(parse_json(", "isinstance(None and "
        "parse_json("), cases.schema_that_is_none,
    ),
    Mutant(
        "texts of any length", Code(field_types.Text.check, "> self.max_bytes", "> 10**9"),
        cases.payload("regex", regex="a" * 10_000),
    ),
    # settings
    Mutant(
        "settings that do not exist", Code(sources._check_name, "if name in names:", "if True:"),
        cases.unknown_setting,
    ),
    # API keys and bodies of the gateway
    Mutant(
        "keys of any length",
        Code(key_access._secret, "len(secret) > _MAX_SECRET_CHARS", "False"), cases.long_key,
    ),
    Mutant(
        "bodies of any size", Code(request_body._read, "if size > limit:", "if False:"),
        cases.long_body,
    ),
    Mutant(
        "bodies of any declared size",
        Code(request_body._read, "int(declared[:20]) > limit", "False"), cases.declared_body,
    ),
    Mutant(
        "bodies that never come",
        Code(request_body._read, "settings.body_timeout_s):", "None):"), cases.slow_body,
    ),
    Mutant(
        "bodies of any depth", Bound(request_body, "_MAX_DEPTH", 10**6), cases.deep_body,
    ),
    # request ids, which become keys
    Mutant(
        "ids of any characters", Code(field_types.Name.check, "fullmatch", "search"),
        cases.payload("id", id="a b"),
    ),
    Mutant(
        "prompts of any number of tokens", Bound(request, "MAX_PROMPT_TOKENS", 10**9),
        cases.payload("token ids", prompt=[1] * 300_000),
    ),
)  # fmt: skip
