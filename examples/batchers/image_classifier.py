"""An image classifier of PyTorch with random weights, served in batches of images of one size.

penstock worker --batcher image_classifier:ImageClassifier --name images     (in this folder)
python examples/batchers/ask.py images picture.ppm

A payload is ``{"width": w, "height": h, "rgb": bytes}``. Images of several sizes cannot be stacked,
so the size is their key; and a batch is bounded by its pixels, which are the cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LABELS = ("bridge", "dam", "mill", "turbine")


class ImageClassifier:
    """What the worker serves."""

    version = "random weights, seed 0"

    def load(self) -> None:
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        layers = [
            nn.Conv2d(3, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
        ]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(LABELS))]
        self.model = nn.Sequential(*layers, *head).to(self.device).eval()

    def key(self, item: dict[str, Any]) -> tuple[int, int]:
        width, height, rgb = item["width"], item["height"], item["rgb"]
        if min(width, height) < 8 or len(rgb) != 3 * width * height:
            raise ValueError("an image has at least 8 x 8 pixels, and three bytes for each")
        return width, height

    def cost(self, item: dict[str, Any]) -> int:
        return int(item["width"] * item["height"])

    @torch.inference_mode()
    def infer(self, items: list[dict[str, Any]]) -> list[dict[str, float]]:
        width, height = items[0]["width"], items[0]["height"]
        pixels = b"".join(item["rgb"] for item in items)
        rows = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        images = rows.view(len(items), height, width, 3).permute(0, 3, 1, 2).to(self.device)
        shares = self.model(images.float() / 255).softmax(1).tolist()
        return [dict(zip(LABELS, row, strict=True)) for row in shares]
