"""A classifier with the two methods of scikit-learn's, served in batches. Needs nothing but Python.

penstock worker --batcher nearest_centroid:Flowers --name flowers     (in this folder)
python examples/batchers/ask.py flowers '[5.1, 3.5, 1.4, 0.2]'
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SAMPLES = {
    "setosa": [(5.0, 3.4, 1.5, 0.2), (4.9, 3.1, 1.4, 0.1), (5.4, 3.9, 1.7, 0.4)],
    "versicolor": [(5.9, 2.8, 4.3, 1.3), (6.4, 3.2, 4.5, 1.5), (5.5, 2.3, 4.0, 1.3)],
    "virginica": [(6.6, 3.0, 5.6, 2.0), (6.3, 3.3, 6.0, 2.5), (7.1, 3.0, 5.9, 2.1)],
}


class NearestCentroid:
    """``fit`` and ``predict`` as scikit-learn has them: put any other estimator in its place."""

    def fit(self, rows: Sequence[Sequence[float]], labels: Sequence[str]) -> NearestCentroid:
        self.centroids = {}
        for label in dict.fromkeys(labels):
            own = [row for row, its in zip(rows, labels, strict=True) if its == label]
            self.centroids[label] = [sum(column) / len(own) for column in zip(*own, strict=True)]
        return self

    def predict(self, rows: Sequence[Sequence[float]]) -> list[str]:
        return [
            min(self.centroids, key=lambda c: math.dist(row, self.centroids[c])) for row in rows
        ]


class Flowers:
    """What the worker serves: a payload is a list of four numbers, a result is a name."""

    version = "1"

    def load(self) -> None:
        rows = [row for samples in SAMPLES.values() for row in samples]
        labels = [label for label, samples in SAMPLES.items() for _ in samples]
        self.model = NearestCentroid().fit(rows, labels)

    def infer(self, items: list[object]) -> list[object]:
        rows = [item if self.is_row(item) else None for item in items]
        found = iter(self.model.predict([row for row in rows if row is not None]))
        wrong = ValueError("a flower is a list of four numbers")
        return [wrong if row is None else next(found) for row in rows]

    def is_row(self, item: object) -> bool:
        return (
            isinstance(item, list) and len(item) == 4 and all(type(x) in (int, float) for x in item)
        )
