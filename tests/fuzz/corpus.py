"""Messages that once escaped the boundary, as they arrived. Each stays a test."""

from __future__ import annotations

import msgpack


def wire(**fields: object) -> bytes:
    return msgpack.packb({"v": 1, "id": "bad", "prompt": "x", **fields})


NESTED = b"\x91" * 1000 + b"\x01"
HEAD = bytes.fromhex("84a17601a26964a3") + b"bad" + b"\xa6prompt\xa1x"

PAYLOADS = {
    "an empty payload": b"",
    "a prompt nested 1,000 deep": HEAD.replace(b"\x84", b"\x83")[:-2] + NESTED,
    "a lane nested 1,000 deep": HEAD + b"\xa4lane" + NESTED,
    "a version nested 1,000 deep": b"\x81\xa1v" + NESTED,
    "a field called cls": wire(cls=1),
    "a field called self": wire(self=1),
    "a field name with a line end": wire(**{"a\nERROR forged": 1}),
    "a field name of 900 kB": wire(**{"a" * 900_000: 1}),
    "a field name that turns text around": wire(**{"\u202e": 1}),
    "a token id of 900 kB": wire(logit_bias={"k" * 900_000: 1}),
    "an extension type": wire(top_k=msgpack.ExtType(5, b"x" * 1000)),
    "a timestamp": wire(seed=msgpack.Timestamp(1)),
    "an array longer than the message": b"\x83\xa1v\x01\xa2id\xa1a\xa6prompt\xdd\xff\xff\xff\xff",
    "a string that is not UTF-8": b"\x83\xa1v\x01\xa2id\xa1a\xa6prompt\xa1\xff",
    "a map with a number as a key": b"\x81\x01\x01",
}

ENTRIES = {
    "a lone surrogate as a token id": ["prompt", "x", "logit_bias", '{"\\ud800":1}'],
    "a lone surrogate in a message": ["messages", '[{"role":"\\ud800","content":"x"}]'],
    "a lone surrogate as a key": ["messages", '[{"\\ud800":1}]'],
    "a lone surrogate to stop at": ["prompt", "x", "stop_json", '["\\ud800"]'],
    "a bias of 4,000 digits": ["prompt", "x", "logit_bias", '{"1":' + "9" * 4000 + "}"],
    "a bias of 5,000 digits": ["prompt", "x", "logit_bias", '{"1":' + "9" * 5000 + "}"],
    "a token id of 4,000 digits": ["prompt_ids", "[" + "9" * 4000 + "]"],
    "texts nested 50,000 deep": ["prompt", "x", "stop_json", "[" * 50_000 + "]" * 50_000],
    "messages nested 500 deep": ["messages", "[" * 500 + "{}" + "]" * 500],
    "100,000 empty messages": ["messages", "[" + "{}," * 99_999 + "{}]"],
    "a schema with 5,000 digits": ["prompt", "x", "json_schema", '{"a":' + "9" * 5000 + "}"],
    "a schema nested 500 deep": ["prompt", "x", "json_schema", '{"a":' * 500 + "1" + "}" * 500],
    "a number of 400 digits": ["prompt", "x", "temperature", "1" + "0" * 20 + "e400"],
    "a field name of 900 kB": ["prompt", "x", "a" * 900_000, "1"],
    "a field name with a line end": ["prompt", "x", "a\nERROR forged", "1"],
}
