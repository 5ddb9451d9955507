"""Without an event loop: the same client, blocking. May be shared by threads.

python examples/blocking.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.producer import BlockingProducer

PROMPTS = ("The list type", "def parse(", "Raise ValueError if")


def main() -> None:
    with BlockingProducer() as producer:  # the server of REDIS_URL
        # A stream is a plain iterator ...
        question = [{"role": "user", "content": "What is a mapping?"}]
        stream = producer.generate(question, max_tokens=32)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(f"\n{stream.end}\n")

        # ... and threads may wait for whole results at the same time.
        def ask(prompt: str) -> str:
            submitted = producer.submit(prompt, max_tokens=16)
            return producer.result(submitted.id, timeout=60).text

        with ThreadPoolExecutor() as pool:
            for prompt, text in zip(PROMPTS, pool.map(ask, PROMPTS), strict=True):
                print(repr(prompt), "->", repr(text))


if __name__ == "__main__":
    main()
