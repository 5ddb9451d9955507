"""A reader is killed in the middle of a stream; another one goes on at the token where it was.

python examples/resume.py

The reader is a process of its own (this file, run with an id). After each chunk it stores the text
so far, the index of the next token and the digest of all before, as a web page would keep them.
Then it is killed, without a chance to clean up. The request does not notice.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.producer import Producer

TOKENS = 120
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


async def read(request_id: str, notebook: Path) -> None:
    """Read on from where the notebook says, and keep it up to date."""
    page = load(notebook)
    async with Producer() as producer:
        stream = producer.stream(
            request_id, from_index=page["index"], from_digest=page["digest"], timeout=30
        )
        async for chunk in stream:
            text = page["text"] + chunk.text
            page = {"index": stream.index, "digest": stream.digest, "text": text}
            save(notebook, page)
            print(stream.index, flush=True)


async def main(notebook: Path) -> int:
    async with Producer() as producer:
        accepted = await producer.submit("The list type", max_tokens=TOKENS, ignore_eos=True)

        reader = await start_reader(accepted.id, notebook)
        assert reader.stdout is not None
        while int(await reader.stdout.readline()) < KILL_AFTER:
            pass
        reader.kill()
        await reader.communicate()
        print(f"killed the reader after {load(notebook)['index']} tokens")

        await (await start_reader(accepted.id, notebook)).communicate()
        page = load(notebook)
        print(f"the next one read up to token {page['index']}")

        whole = await producer.result(accepted.id)
    same = page["text"] == whole.text and page["index"] == len(whole.token_ids) == TOKENS
    print(f"what both read is the whole text: {same}")
    return 0 if same else 1


async def start_reader(request_id: str, notebook: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, request_id, str(notebook), stdout=subprocess.PIPE
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(read(sys.argv[1], Path(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(asyncio.run(main(Path(folder) / "page.json")))
