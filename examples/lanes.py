"""Urgent work goes past a backlog: many batch requests of one tenant, then one critical request.

A worker with few places shows it best: penstock worker --max-sequences 8

python examples/lanes.py
python examples/lanes.py 40        a smaller backlog
"""

from __future__ import annotations

import asyncio
import sys

from penstock.producer import Producer, Result


async def main(backlog: str = "120") -> None:
    async with Producer() as producer:
        submitted = [
            await producer.submit("The list type", lane="batch", tenant="night", max_tokens=24)
            for _ in range(int(backlog))
        ]
        submitted.append(
            await producer.submit("Return", lane="critical", tenant="shop", max_tokens=24)
        )
        ended: list[Result] = []

        async def follow(request_id: str) -> None:
            ended.append(await producer.result(request_id))

        await asyncio.gather(*(follow(each.id) for each in submitted))

    place = [result.id for result in ended].index(submitted[-1].id)
    print(f"submitted last of {len(ended)}, the critical request ended as number {place + 1}")
    print(f"its first token came after {ttft(ended[place])} ms")
    print(f"the last batch request's after {max(map(ttft, ended))} ms")


def ttft(result: Result) -> int:
    assert result.usage is not None
    assert result.usage.ttft_ms is not None
    return result.usage.ttft_ms


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
