"""Submit a prompt and print its text as it comes.

python examples/stream.py
python examples/stream.py "A string literal" 64
"""

from __future__ import annotations

import asyncio
import sys

from penstock.producer import Producer


async def main(prompt: str = "The list type", max_tokens: str = "48") -> None:
    async with Producer() as producer:  # the server of REDIS_URL
        stream = await producer.generate(prompt, max_tokens=int(max_tokens), temperature=0.7)
        print(prompt, end="")
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(f"\n\n{stream.end}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
