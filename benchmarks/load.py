"""Time the start of an engine that reads 16 GB of real weights: Llama 3 8B's shapes, random values.

    python benchmarks/load.py [--folder FOLDER] [--rounds 2]

Writes the checkpoint into FOLDER unless it is there already. Each round starts an engine in a
process of its own and generates one token; before the first of them the files are dropped from the
page cache, where this process may do that (root on Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file

from benchmarks.workloads import SHAPES, write_config

_SHARD_BYTES = 5 * 10**9


def tensors(shape: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a llama checkpoint's tensors."""
    hidden, inner, vocab = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["vocab_size"],
    )
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    names = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        names |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    return names | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write(folder: Path) -> None:
    """Write config and weights, in shards of 5 GB as the hub has them."""
    write_config("llama3_8b", folder)
    generator = torch.Generator("cuda").manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in tensors(SHAPES["llama3_8b"]).items():
        values = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        shard[name] = values.normal_(0.0, 0.02, generator=generator).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            flush()
    flush()
    content = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def start(folder: Path) -> None:
    """Start an engine, print how long it took until the first token."""
    begin = time.perf_counter()
    from engine_core import LLM, EngineConfig, SamplingParams, own_process

    own_process.claim()
    imported = time.perf_counter() - begin
    with LLM(str(folder), EngineConfig(skip_tokenizer_init=True, max_model_len=8192)) as llm:
        llm.generate([[1000] * 64], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        seconds = time.perf_counter() - begin
        phases = ", ".join(f"{name} {value:.2f}" for name, value in llm.startup.items())
        print(f"{seconds:.2f} s to the first token (imports {imported:.2f}, {phases})", flush=True)


def main() -> None:
    """Write the checkpoint, then start engines on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llama3_8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        start(arguments.folder)
        return
    if not (arguments.folder / "model.safetensors.index.json").exists():
        begin = time.perf_counter()
        write(arguments.folder)
        print(f"wrote {arguments.folder} in {time.perf_counter() - begin:.0f} s", flush=True)
    nbytes = sum(path.stat().st_size for path in arguments.folder.glob("*.safetensors"))
    print(f"{torch.cuda.get_device_name()}, {nbytes / 1e9:.1f} GB of weights", flush=True)
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        print("from disk:", end=" ", flush=True)
    except OSError as error:
        print(f"page cache not dropped ({error}):", end=" ", flush=True)
    command = [sys.executable, __file__, "--start", "--folder", str(arguments.folder)]
    for index in range(arguments.rounds):
        if index:
            print("from the page cache:", end=" ", flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
