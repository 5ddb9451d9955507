"""Rerankers and classifiers: encoders with a classification head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.shared.protocol.states import ModelKind

from .encoder import Row
from .encoder_batcher import EncoderBatcher, check_fields
from .encoder_items import Work, estimate_tokens, read_flag, read_text, read_texts

__all__ = ["Classifier", "Reranker"]


class _Scorer(EncoderBatcher):
    def _compute(self, rows: Sequence[Row], works: Sequence[Work]) -> Tensor:
        """Logits on the CPU ``[rows, labels]``, float32."""
        del works
        result = torch.empty(len(rows), self.encoder.model.config.num_labels)
        for group in self.encoder.run(rows):
            result[group.indexes] = group.output.float().cpu()
        return result


class Reranker(_Scorer):
    """Says how well documents answer a query: a cross-encoder with one label.

    An item is a map: ``query``, a text; ``documents``, a list of texts; ``truncate``, to cut what
    is too long. Its answer is a map: ``scores``, one for each document, and ``tokens``. Scores are
    those of sentence-transformers' ``CrossEncoder``: a sigmoid of the logit, unless the checkpoint
    names another function.
    """

    kind = ModelKind.RERANK

    def cost(self, item: object) -> int:
        """About how many tokens an item has: the query's once more for each document."""
        if not isinstance(item, Mapping):
            return 1
        documents = item.get("documents")
        count = len(documents) if isinstance(documents, Sequence) else 1
        return estimate_tokens(documents) + count * estimate_tokens(item.get("query"))

    def _read(self, item: Mapping[str, Any]) -> Work:
        check_fields(item, "documents", "query", "truncate")
        query = read_text(item.get("query"), "query")
        documents = read_texts(item.get("documents"), "documents", ids=False)
        fields = [f"documents[{number}]" for number in range(len(documents))]
        pairs = [(query, str(document)) for document in documents]
        return Work(pairs, fields, read_flag(item, "truncate"))

    def _answer(self, work: Work, values: Tensor, num_tokens: int) -> dict[str, Any]:
        del work
        activation = getattr(nn, self.encoder.recipe.activation or "Sigmoid")()
        return {"scores": activation(values[:, 0]).tolist(), "tokens": num_tokens}


class Classifier(_Scorer):
    """Says which classes texts belong to.

    An item is a map. ``input`` is a list of texts, lists of token ids, and pairs of texts that are
    read together. ``truncate`` cuts what is too long. Its answer is a map: ``labels``, the names of
    the classes; ``probs``, for each text the probability of each class; ``tokens``. As in
    transformers' pipeline the probabilities of one text add up to 1 (softmax), unless the
    checkpoint has several labels for one text (``multi_label_classification``): sigmoid.
    """

    kind = ModelKind.CLASSIFY

    def cost(self, item: object) -> int:
        """About how many tokens an item has."""
        return estimate_tokens(item.get("input")) if isinstance(item, Mapping) else 1

    def _read(self, item: Mapping[str, Any]) -> Work:
        check_fields(item, "input", "truncate")
        texts = read_texts(item.get("input"), "input", pairs=True)
        fields = [f"input[{number}]" for number in range(len(texts))]
        return Work(texts, fields, read_flag(item, "truncate"))

    def _answer(self, work: Work, values: Tensor, num_tokens: int) -> dict[str, Any]:
        del work
        config = self.encoder.model.config
        several = config.problem_type == "multi_label_classification"
        probs = values.sigmoid() if several else values.softmax(-1)
        labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        return {"labels": labels, "probs": probs.tolist(), "tokens": num_tokens}
