"""Documents to token windows: tokenised once, reshuffled and repacked every epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast

from .corpus import Document


def encode_documents(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, chats: bool = True
) -> list[list[int]]:
    """Token ids of every document in plain form and, with ``chats``, every conversation.

    The plain form is ``BOS text EOS``; the chat form is what the chat template renders.
    """
    texts = [f"{tokenizer.bos_token}{d.plain}{tokenizer.eos_token}" for d in documents]
    if chats:
        texts += [
            str(tokenizer.apply_chat_template(messages, tokenize=False))
            for document in documents
            for messages in document.chats()
        ]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return encoded


class WindowSampler:
    """Windows of ``length`` + 1 tokens (inputs and shifted targets), without replacement.

    An epoch shuffles the documents, joins them, drops a random head so that cuts fall elsewhere
    each time, and shuffles the windows. The result depends on seed and batch index only, which is
    what makes a resumed run equal to an uninterrupted one.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]], length: int, batch_size: int, seed: int
    ) -> None:
        self.documents = [torch.tensor(ids, dtype=torch.int32) for ids in documents]
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        total = sum(len(ids) for ids in documents)
        self.batches_per_epoch = (total - length) // (length + 1) // batch_size
        if self.batches_per_epoch < 1:
            raise ValueError(
                f"corpus of {total} tokens is too small for one batch of {batch_size} x {length}"
            )
        self._epoch = -1
        self._windows = torch.empty(0)

    def batch(self, index: int) -> torch.Tensor:
        """Batch ``index`` of the endless sequence: int64 [batch_size, length + 1]."""
        epoch, position = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._windows = self._pack(epoch)
            self._epoch = epoch
        start = position * self.batch_size
        return self._windows[start : start + self.batch_size].long()

    def _pack(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        stream = torch.cat([self.documents[i] for i in order])
        head = int(torch.randint(self.length, (1,), generator=generator))
        width = self.length + 1
        count = (len(stream) - head) // width
        windows = stream[head : head + count * width].view(count, width)
        return windows[torch.randperm(count, generator=generator)]
