"""Reads the golden fixtures: checkpoints with the outputs of each family's original code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenPrompt:
    name: str
    input_ids: list[int]
    new_tokens: list[int]
    prefill_logits: torch.Tensor  # [prompt length, vocab]
    step_logits: torch.Tensor  # [16, vocab]


def golden_prompts(name: str) -> list[GoldenPrompt]:
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    tensors = load_file(folder / "expected.safetensors")
    return [
        GoldenPrompt(
            name=prompt["name"],
            input_ids=prompt["input_ids"],
            new_tokens=prompt["new_tokens"],
            prefill_logits=tensors[prompt["prefill_logits"]],
            step_logits=tensors[prompt["step_logits"]],
        )
        for prompt in expected["prompts"]
    ]
