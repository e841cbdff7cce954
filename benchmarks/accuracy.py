"""How far each quantisation is from float32, in one table.

    python benchmarks/accuracy.py [stories15m] [smollm2] [--tokens 400]

For each scheme: the mean Kullback-Leibler divergence of the next token's distribution from that of
float32, and the share of positions whose likeliest token is the same, over a fixed text. Everything
is computed in float32 on the CPU, but for the row "bfloat16". Rows that begin with "checkpoint" are
files in a tool's format; where the package compressed-tensors is installed it packs those that are
its own, and the weights as loaded are compared with its own dequantisation: the last column is
their greatest difference. "and activations" quantises the inputs of the linears row by row too, as
a GPU does for more than 64 rows. "As a GPU has it" is what is made at load there. The packers of 4
bits, and of 8 with scales of groups, are those of the tests, which round to nearest; a tool that
calibrates comes nearer. Blocks of GGUF files are packed by the package gguf; on a CPU they are
multiplied as they are, by inputs in 8 bits.

The models are those of ``make models``. SmolLM2's file has 4 bits, so float32 is what these are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import gguf
import packed_checkpoints
import torch
from packed_checkpoints import FORMATS, Format
from safetensors.torch import save_file
from stories15m import write_stories15m
from torch import Tensor, nn

from benchmarks import gguf_file
from engine_core import EngineConfig
from engine_core.kernels.row_codes import quantize_rows
from engine_core.nn.linear import Linear
from engine_core.nn.quantization import Fp8LinearMethod
from engine_core.nn.quantization.fp8_checkpoint import Fp8Method
from engine_core.nn.quantization.groups import GroupLinearMethod
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.source import find_scheme, open_files, option_scheme, read_config
from engine_core.step_context import BuildContext
from engine_core.testing.tiny_model import TinyModel

ROOT = Path(__file__).resolve().parents[1]
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
FP8 = torch.float8_e4m3fn
Packed = tuple[dict[str, Tensor], Tensor | None]


class QuantisedRows(Fp8LinearMethod):
    """Activations quantised row by row, and turned back."""

    def apply(self, layer: Linear, x: Any, bias: Tensor | None) -> Tensor:
        """The product of what is left of them."""
        codes, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
        return super().apply(layer, (codes.float() * scales[:, None]).view(x.shape), bias)


class QuantisedRows8(GroupLinearMethod):
    """Activations quantised row by row to int8, and turned back."""

    def apply(self, layer: Linear, x: Any, bias: Tensor | None) -> Tensor:
        """The product of what is left of them."""
        scales = x.abs().amax(-1, keepdim=True) / 127
        scales = torch.where(scales == 0, 1, scales)
        return super().apply(layer, (x / scales).round() * scales, bias)


def texts(name: str) -> list[list[int]]:
    """Token ids to run on."""
    folder = ROOT / "tests" / "references"
    if name == "stories15m":
        read: list[list[int]] = json.loads((folder / "stories15m_text.json").read_text())["stories"]
        return read
    prompts = json.loads((folder / "smollm2_greedy.json").read_text())["prompts"]
    return [prompt["prompt_token_ids"] + prompt["token_ids"] for prompt in prompts]


def source(name: str, folder: Path) -> Path:
    """The checkpoint of a model."""
    models = ROOT / ".cache" / "models"
    if name == "stories15m":
        return write_stories15m(models / "stories15M.data", folder)
    return models / "SmolLM2-135M-Instruct.Q4_1.gguf"


def numbers_of(path: Path) -> str | None:
    """The option that has weights be numbers: of a GGUF file on a CPU they are not by default."""
    return "unpacked" if path.suffix == ".gguf" else None


def load(
    path: Path,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device = CPU,
    kv_cache_dtype: Any = "auto",
) -> nn.Module:
    """The model, packed as for ``device``."""
    registry = build_registry(())
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig(device="cpu", dtype=name, quantization=quantization or numbers_of(path))
    scheme = option_scheme(config, registry, device)
    checkpoint = open_files(str(path), config, registry, CPU, scheme)
    scheme = find_scheme(checkpoint, config, scheme, registry, device)
    model_config = read_config(registry, checkpoint, "auto")
    model_class = registry.model_class(model_config.architecture)
    context = BuildContext(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    model = build_on_meta(model_class, model_config, context, scheme)
    matched, _ = match_weights(model, checkpoint, str(path), scheme)
    load_weights(model, matched, str(path), CPU, pack=True)
    return model


@torch.inference_mode()
def log_probabilities(model: nn.Module, ids: Iterable[list[int]]) -> Tensor:
    """``[tokens, vocab]``."""
    tiny = TinyModel(model, None)
    sequences = [tiny.sequence(text, len(text)) for text in ids]
    steps = [[(i, s, n)] for i, text in enumerate(sequences) for s, n in text.chunks(50)]
    return torch.cat(tiny.run(sequences, steps).logits).float().log_softmax(-1)


def by_compressed_tensors(strategy: str, weight: Tensor) -> Packed | None:
    """Packed by the package, and what it dequantises to; None if it is not installed."""
    try:
        from compressed_tensors.compressors import FloatQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams
    except ImportError:
        return None
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    dims = None if strategy == "tensor" else 1
    low = weight.amin() if dims is None else weight.amin(1, keepdim=True)
    high = weight.amax() if dims is None else weight.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low.reshape(-1, 1), high.reshape(-1, 1), args)
    scale = scale.reshape(-1) if dims is None else scale
    held = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packed = FloatQuantizationCompressor.compress(held, scheme)
    restored = FloatQuantizationCompressor.decompress(packed, scheme)["weight"]
    return {name: packed[name] for name in ("weight", "weight_scale")}, restored


def by_hand(strategy: str, weight: Tensor) -> Packed:
    """Packed by the published formats."""
    n, k = weight.shape
    rows, cols = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[strategy]
    blocks = nn.functional.pad(weight, (0, -k % cols, 0, -n % rows))
    scales = blocks.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(cols, 1)[:, :k]
    codes = (weight / spread).to(FP8)
    leaf = "weight_scale_inv" if strategy == "block" else "weight_scale"
    scales = scales.reshape(-1) if strategy == "tensor" else scales
    return {"weight": codes, leaf: scales}, codes.float() * spread


def write_packed(path: Path, folder: Path, strategy: str) -> tuple[Path, dict[str, Tensor]]:
    """A copy whose linears are e4m3, and the numbers that its packer says they are."""
    config = EngineConfig(device="cpu", dtype="float32", quantization=numbers_of(path))
    checkpoint = open_files(str(path), config, build_registry(()), CPU)
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    group["weights"]["strategy"] = strategy
    settings: dict[str, Any] = {"quant_method": "compressed-tensors"}
    settings["config_groups"] = {"group_0": group}
    if strategy == "block":
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights():
        weight = tensor.float().clone()
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        packed = None if strategy == "block" else by_compressed_tensors(strategy, weight)
        held, expected[name] = packed or by_hand(strategy, weight)
        stem = name.removesuffix("weight")
        tensors |= {stem + leaf: value.contiguous() for leaf, value in held.items()}
    folder.mkdir()
    hf_config = {**checkpoint.hf_config.to_dict(), "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file(tensors, folder / "model.safetensors")
    return folder, expected


def write_integers(path: Path, folder: Path, form: Format) -> tuple[Path, dict[str, Tensor]]:
    """A copy whose linears are integers, and the numbers that the tests' packer says they are."""
    config = EngineConfig(device="cpu", dtype="float32", quantization=numbers_of(path))
    checkpoint = open_files(str(path), config, build_registry(()), CPU)
    tensors = {name: tensor.float().clone() for name, tensor in checkpoint.weights()}
    held, plain = packed_checkpoints.packed(
        tensors, form, lambda name: not name.endswith("_proj.weight")
    )
    folder.mkdir()
    hf_config = {**checkpoint.hf_config.to_dict(), "quantization_config": form.settings}
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file({n: t.contiguous() for n, t in held.items()}, folder / "model.safetensors")
    return folder, {name: plain[name] for name in tensors if name.endswith("_proj.weight")}


# Those that the gguf package packs; it has no packer for K types.
BLOCKS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
# A tensor's name in GGUF, by Hugging Face's.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, file: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """A GGUF file whose linears are blocks of a type, and the numbers that its packer says.

    Rows of queries and keys are in llama.cpp's order, whose rotation pairs neighbours.
    """
    config = EngineConfig(device="cpu", dtype="float32", quantization=numbers_of(path))
    checkpoint = open_files(str(path), config, build_registry(()), CPU)
    hf = checkpoint.hf_config.to_dict()
    half = hf["hidden_size"] // hf["num_attention_heads"] // 2
    block = gguf.GGMLQuantizationType[kind]
    theta = hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"]
    writer = gguf_file.begin({**hf, "rope_theta": theta}, file)
    expected: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights():
        stem = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, leaf = stem.partition(".")
        known = f"blk.{layer}.{_GGUF_NAMES[leaf]}" if layer.isdigit() else _GGUF_NAMES[stem]
        weight = tensor.float().numpy()
        if not name.endswith("_proj.weight"):
            writer.add_tensor(f"{known}.weight", weight.copy())
            continue
        codes = gguf.quantize(weight, block)
        expected[name] = torch.from_numpy(gguf.dequantize(codes, block).reshape(weight.shape))
        if known.endswith(("attn_q", "attn_k")):
            pairs = codes.reshape(-1, 2, half, codes.shape[-1]).swapaxes(1, 2)
            codes = pairs.reshape(codes.shape)
        writer.add_tensor(f"{known}.weight", codes, raw_dtype=block)
    gguf_file.end(writer)
    return file, expected


def of_group(form: Format, size: int) -> Format:
    """A format with groups of another size."""
    settings = json.loads(json.dumps(form.settings))
    for given in (settings, settings.get("config_groups", {}).get("group_0", {}).get("weights")):
        if given and "group_size" in given:
            given["group_size"] = size
    return form._replace(settings=settings, group=size)


# By the title of a row; True if groups are of 64, or of 32 where 64 do not divide the inputs.
INTEGERS = {
    "awq": ("awq", True),
    "gptq": ("gptq", True),
    "gptq, zeros": ("gptq v2", True),
    "gptq, act-order": ("gptq, act-order", True),
    "gptq, 8 bits": ("gptq of 8 bits", True),
    "compressed-tensors": ("compressed", True),
    "compressed-tensors, zeros": ("compressed, zeros", True),
    "compressed-tensors, a scale a row": ("compressed by rows", False),
    "compressed-tensors, int8": ("int8 and activations", False),
}


def difference(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """The greatest one between a linear's weights and those that its packer says they are."""
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    most, compared = 0.0, 0
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            path, _, last = name.rpartition(".")
            names = [f"{path}.{part}.weight" for part in merged.get(last, (last,))]
            whole = torch.cat([expected[each] for each in names])
            most = max(most, (layer.weight - whole).abs().max().item())
            compared += len(names)
    assert compared == len(expected), f"{compared} of {len(expected)} weights were compared"
    return most


def measure(name: str, tokens: int) -> None:
    """Print the rows of one model."""
    ids: list[list[int]] = []
    for text in texts(name):
        ids += [text] if sum(map(len, ids)) < tokens else []
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        path = source(name, folder)
        plain = load(path, None, torch.float32)
        width = next(m for m in plain.modules() if isinstance(m, Linear)).in_features
        exact = log_probabilities(plain, ids)
        print(f"{name}, {len(exact)} tokens".ljust(40) + "mean KL   equal   off", flush=True)

        def row(title: str, make: Callable[[], nn.Module], expected: Any = None) -> None:
            model = make()
            off = "" if expected is None else f"{difference(model, expected):.1e}"
            other = log_probabilities(model, ids)
            divergence = (exact.exp() * (exact - other)).sum(-1).mean().item()
            equal = (exact.argmax(-1) == other.argmax(-1)).float().mean().item()
            print(f"{title:38} {divergence:8.5f}  {equal:6.1%}  {off}", flush=True)

        def with_rows(make: Callable[[], nn.Module]) -> nn.Module:
            model = make()
            for layer in model.modules():
                if isinstance(layer, Linear) and isinstance(layer.method, GroupLinearMethod):
                    layer.method = QuantisedRows8(layer.method._layout, on_cpu=False)
                if isinstance(layer, Linear) and isinstance(layer.method, Fp8Method):
                    layer.method = QuantisedRows(on_cpu=True)
            return model

        row("bfloat16", lambda: load(path, None, torch.bfloat16))
        for cache in ("int8", "fp8"):
            make = lambda cache=cache: load(path, None, torch.float32, CPU, cache)  # noqa: E731
            row(f"KV cache of {cache}", make)
        for scheme in ("int8", "int4", "fp8"):
            row(scheme, lambda scheme=scheme: load(path, scheme, torch.float32))
        for scheme in ("int8", "int4"):
            make = lambda scheme=scheme: load(path, scheme, torch.float32, GPU)  # noqa: E731
            row(f"{scheme} as a GPU has it", make)
        row("fp8 and activations", lambda: with_rows(lambda: load(path, "fp8", torch.float32)))
        for strategy in ("tensor", "channel", "block"):
            packed, expected = write_packed(path, folder / strategy, strategy)
            make = lambda packed=packed: load(packed, None, torch.float32)  # noqa: E731
            row(f"checkpoint, a scale a {strategy}", make, expected)
            if strategy != "block":
                row("    and activations", lambda make=make: with_rows(make))
            shutil.rmtree(packed)
        for kind in BLOCKS:
            packed, expected = write_gguf(path, folder / f"{kind}.gguf", kind)
            make = lambda packed=packed: load(packed, None, torch.float32)  # noqa: E731
            row(f"GGUF, {kind}", make, expected)
            make = lambda packed=packed: load(packed, "gguf", torch.float32)  # noqa: E731
            row("    on a CPU", make)
            packed.unlink()
        for title, (kind, grouped) in INTEGERS.items():
            form = FORMATS[kind]
            if grouped:
                form = of_group(form, 64 if width % 64 == 0 else 32)
            packed, expected = write_integers(path, folder / "integers", form)
            make = lambda packed=packed: load(packed, None, torch.float32, GPU)  # noqa: E731
            row(f"checkpoint, {title}", make, expected)
            if "activations" in kind:
                row("    and activations", lambda make=make: with_rows(make))
            make = lambda packed=packed: load(packed, None, torch.float32)  # noqa: E731
            row("    on a CPU", make)
            shutil.rmtree(packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["stories15m", "smollm2"])
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    for name in arguments.models:
        measure(name, arguments.tokens)


if __name__ == "__main__":
    main()
