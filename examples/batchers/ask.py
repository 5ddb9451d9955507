"""Ask a model that answers at once: for one result, and for many at a time.

python examples/batchers/ask.py flowers '[5.1, 3.5, 1.4, 0.2]'
python examples/batchers/ask.py images picture.ppm
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from penstock.producer import Producer

MANY = 200


def read_payload(text: str) -> object:
    """JSON as it is, or a picture in the binary form of PPM."""
    if not text.endswith(".ppm"):
        return json.loads(text)
    data = Path(text).read_bytes()
    kind, width, height = data.split(maxsplit=3)[:3]
    assert kind == b"P6", "a picture in binary PPM"
    pixels = int(width) * int(height)
    return {"width": int(width), "height": int(height), "rgb": data[-3 * pixels :]}


async def main(model: str, text: str) -> None:
    payload = read_payload(text)
    async with Producer(model=model) as producer:  # the server of REDIS_URL
        print(await producer.infer(payload, lane="critical", timeout=30))
        began = time.perf_counter()
        await asyncio.gather(*(producer.infer(payload, timeout=30) for _ in range(MANY)))
    print(f"{MANY / (time.perf_counter() - began):.0f} answers a second")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
