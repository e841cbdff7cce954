"""Checkpoints of integers as AutoAWQ, GPTQModel and compressed-tensors lay them out.

Written from the formats' descriptions, one number after another; the engine's code is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


class Quantised(NamedTuple):
    """Codes ``[N, K]`` from 0 on, scales and zeros ``[N, groups]``, the group of each input."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def numbers(self) -> Tensor:
        """``(codes - zeros) * scales``, rounded once to float32."""
        zeros, scales = (each.double()[:, self.groups] for each in (self.zeros, self.scales))
        return ((self.codes.double() - zeros) * scales).float()


class Format(NamedTuple):
    """A way to quantise and to pack."""

    settings: dict[str, Any]
    pack: Callable[[Quantised], Tensors]
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    scales: torch.dtype = torch.float16


def rounded(weight: Tensor, form: Format) -> Quantised:
    """Round to nearest; groups of random inputs if they are ordered by another measure."""
    k = weight.shape[1]
    size = k if form.group == -1 else form.group
    groups = torch.arange(k) // size
    if form.ordered:
        groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    most, middle = 2**form.bits - 1, 2 ** (form.bits - 1)
    codes = torch.empty(weight.shape, dtype=torch.int64)
    scales, zeros = [], []
    for group in range(-(-k // size)):
        part = weight[:, groups == group].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if form.symmetric:
            scale = (part.abs().amax(1) / (middle - 1)).to(form.scales)
            zero = torch.full_like(low, middle)
        else:
            scale = ((high - low) / most).to(form.scales)
            zero = (-low / scale.float()).round().clamp(0, most)
        codes[:, groups == group] = (
            (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, most).long()
        )
        scales.append(scale)
        zeros.append(zero.long())
    return Quantised(codes, torch.stack(scales, 1), torch.stack(zeros, 1), groups)


def words(values: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """int32 along the last dimension: value ``places[i]`` of each word in its bits from i on."""
    share = 32 // bits
    numbers = values.numpy().astype(np.uint64)
    short = -numbers.shape[1] % share
    numbers = np.pad(numbers, ((0, 0), (0, short)))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // share), dtype=np.uint64)
    for at, place in enumerate(places or range(share)):
        out |= numbers[:, place::share] << np.uint64(bits * at)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def awq(given: Quantised) -> Tensors:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(given.codes.T, 4, order),
        "qzeros": words(given.zeros.T, 4, order),
        "scales": given.scales.T,
    }


def gptq(bits: int, version: int) -> Callable[[Quantised], Tensors]:
    def pack(given: Quantised) -> Tensors:
        less = 1 if version == 1 else 0
        return {
            "qweight": words(given.codes, bits).T,
            "qzeros": words((given.zeros.T - less) % 2**bits, bits),
            "scales": given.scales.T,
            "g_idx": given.groups.int(),
        }

    return pack


def compressed(bits: int, *, zeros: bool = False, order: bool = False) -> Any:
    def pack(given: Quantised) -> Tensors:
        n, k = given.codes.shape
        held = {
            "weight_packed": words(given.codes, bits),
            "weight_scale": given.scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if zeros:
            held["weight_zero_point"] = words(given.zeros.T, bits).T
        if order:
            held["weight_g_idx"] = given.groups.int()
        return held

    return pack


def int8(given: Quantised) -> Tensors:
    return {"weight": (given.codes - 128).to(torch.int8), "weight_scale": given.scales}


def int8_zeros(given: Quantised) -> Tensors:
    return int8(given) | {"weight_zero_point": (given.zeros - 128).to(torch.int8)}


def signed_zeros(bits: int) -> Callable[[Quantised], Tensors]:
    """compressed-tensors' before 0.9.4: zero points are not packed, though codes are."""

    def pack(given: Quantised) -> Tensors:
        signed = (given.zeros - 2 ** (bits - 1)).to(torch.int8)
        return compressed(bits)(given) | {"weight_zero_point": signed}

    return pack


def awq_settings(size: int) -> dict[str, Any]:
    given = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return {**given, "zero_point": True, "modules_to_not_convert": None}


def gptq_settings(bits: int, size: int, version: int, **more: Any) -> dict[str, Any]:
    given = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False}
    return {**given, "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **more}


def compressed_settings(bits: int, size: int | None, **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("inputs", None)
    strategy = "channel" if size is None else "group"
    given = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": {**given, "group_size": size, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if inputs is None else "int-quantized",
        "config_groups": {"group_0": {**group, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
BF16 = torch.bfloat16
FORMATS: dict[str, Format] = {
    "awq": Format(awq_settings(32), awq, symmetric=False),
    "awq of whole rows": Format(awq_settings(-1), awq, group=-1, symmetric=False),
    "gptq": Format(gptq_settings(4, 64, 1, sym=True), gptq(4, 1), group=64),
    "gptq v2": Format(gptq_settings(4, 32, 2), gptq(4, 2), symmetric=False),
    "gptq v1, zeros": Format(gptq_settings(4, 32, 1), gptq(4, 1), symmetric=False),
    "gptq, act-order": Format(
        gptq_settings(4, 32, 1, desc_act=True), gptq(4, 1), symmetric=False, ordered=True
    ),
    "gptq of 8 bits": Format(gptq_settings(8, 64, 2), gptq(8, 2), bits=8, group=64),
    "compressed": Format(compressed_settings(4, 64), compressed(4), group=64, scales=BF16),
    "compressed, zeros": Format(
        compressed_settings(4, 32, symmetric=False), compressed(4, zeros=True), symmetric=False
    ),
    "compressed, act-order": Format(
        compressed_settings(4, 32, actorder="group"), compressed(4, order=True), ordered=True
    ),
    "compressed by rows": Format(compressed_settings(4, None), compressed(4), group=-1),
    "compressed, 8 bits": Format(
        compressed_settings(8, None), compressed(8), bits=8, group=-1, scales=torch.float32
    ),
    "compressed, 8 bits, zeros": Format(
        compressed_settings(8, 32, symmetric=False),
        compressed(8, zeros=True),
        bits=8,
        symmetric=False,
    ),
    "compressed, signed zeros": Format(
        compressed_settings(4, 32, symmetric=False), signed_zeros(4), symmetric=False
    ),
    "compressed, 8 bits, signed zeros": Format(
        compressed_settings(8, None, symmetric=False),
        signed_zeros(8),
        bits=8,
        group=-1,
        symmetric=False,
    ),
    "int8, zeros": Format(
        compressed_settings(8, None, symmetric=False, inputs=TOKENS),
        int8_zeros,
        bits=8,
        group=-1,
        symmetric=False,
    ),
    "int8 and activations": Format(
        compressed_settings(8, None, inputs=TOKENS), int8, bits=8, group=-1, scales=BF16
    ),
}

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def llama() -> Tensors:
    """Random weights of that shape, under the names of Hugging Face's Llama."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": random(96, 128), "lm_head.weight": random(96, 128)}
    tensors["model.norm.weight"] = torch.ones(128)
    shapes = {"self_attn.q": (128, 128), "self_attn.k": (64, 128), "self_attn.v": (64, 128)}
    shapes |= {"self_attn.o": (128, 128), "mlp.gate": (256, 128), "mlp.up": (256, 128)}
    for layer in range(2):
        place = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}{norm}.weight"] = torch.ones(128)
        for name, shape in (shapes | {"mlp.down": (128, 256)}).items():
            tensors[f"{place}{name}_proj.weight"] = random(*shape)
    return tensors


def packed(tensors: Tensors, form: Format, skips: Callable[[str], bool]) -> tuple[Tensors, Tensors]:
    """Tensors with the linears packed, and with the numbers that these stand for."""
    plain, held = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() < 2 or "embed" in name or skips(name):
            continue
        quantised = rounded(weight, form)
        plain[name] = quantised.numbers
        del held[name]
        stem = name.removesuffix("weight")
        held |= {stem + leaf: tensor for leaf, tensor in form.pack(quantised).items()}
    return held, plain


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def mixtral() -> Tensors:
    """The same with four experts in a layer, whose router is not to be quantised."""
    tensors = llama()
    for name in [name for name in tensors if ".mlp." in name]:
        place, _, which = name.partition("mlp.")
        leaf = {"gate": "w1", "down": "w2", "up": "w3"}[which.partition("_")[0]]
        weight = tensors.pop(name)
        for expert in range(4):
            held = weight.roll(expert + 1, 0) * (1 - expert / 8)
            tensors[f"{place}block_sparse_moe.experts.{expert}.{leaf}.weight"] = held
        router = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)) / 8
        tensors[f"{place}block_sparse_moe.gate.weight"] = router
    return tensors


def write(
    folder: Path, tensors: Tensors, settings: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A checkpoint folder."""
    folder.mkdir()
    config = {**CONFIG, **changes}
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors")
    return folder


def change(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    """Edit the tensors of a checkpoint folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
