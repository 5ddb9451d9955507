"""A reader is killed in the middle of a stream; another one goes on at the token where it was.

python examples/resume.py

The reader is a process of its own (this file, run with an id). After each chunk it stores the text
so far, the index of the next token and the digest of all before, as a web page would keep them.
Amid the stream it is killed, without a chance to clean up. (It does that itself: from outside one
might come too late.) The request does not notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.producer import Producer

TOKENS = 400
KILL_AFTER = 20


def load(notebook: Path) -> dict[str, Any]:
    if not notebook.exists():
        return {"index": 0, "digest": None, "text": ""}
    page: dict[str, Any] = json.loads(notebook.read_text())
    return page


def save(notebook: Path, page: dict[str, Any]) -> None:
    part = notebook.with_suffix(".part")
    part.write_text(json.dumps(page))
    part.rename(notebook)  # so that it is there as a whole or not at all


async def read(request_id: str, notebook: Path, killed_after: int) -> None:
    """Read on from where the notebook says, and keep it up to date; until killed."""
    page = load(notebook)
    async with Producer() as producer:
        stream = producer.stream(
            request_id, from_index=page["index"], from_digest=page["digest"], timeout=30
        )
        async for chunk in stream:
            text = page["text"] + chunk.text
            page = {"index": stream.index, "digest": stream.digest, "text": text}
            save(notebook, page)
            if killed_after <= stream.index < TOKENS:
                os.kill(os.getpid(), signal.SIGKILL)


async def main(notebook: Path) -> int:
    async with Producer() as producer:
        accepted = await producer.submit("The list type", max_tokens=TOKENS, ignore_eos=True)

        code = await run_reader(accepted.id, notebook, killed_after=KILL_AFTER)
        assert code == -signal.SIGKILL, f"the reader ended with {code}"
        print(f"the reader was killed after {load(notebook)['index']} tokens")

        await run_reader(accepted.id, notebook, killed_after=TOKENS)
        page = load(notebook)
        print(f"the next one read up to token {page['index']}")

        whole = await producer.result(accepted.id)
    same = page["text"] == whole.text and page["index"] == len(whole.token_ids) == TOKENS
    print(f"what both read is the whole text: {same}")
    return 0 if same else 1


async def run_reader(request_id: str, notebook: Path, *, killed_after: int) -> int:
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, request_id, str(notebook), str(killed_after)
    )
    return await reader.wait()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        asyncio.run(read(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(asyncio.run(main(Path(folder) / "page.json")))
