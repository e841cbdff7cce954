"""Launches of a start on a GPU, found out without one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest
from gguf_blocks import write_mixed
from golden_fixtures import GOLDEN
from packed_checkpoints import FORMATS, llama, packed, write

pytest.importorskip("triton", reason="triton is not installed")

# Layers: all alike, and two kinds of which every third is the other.
MODELS = ["llama-gqa", "gemma3-ropes", "mixtral-tiny"]


def rehearsals(cache: Path, *arguments: str, script: str = "rehearsed.py") -> list[dict[str, Any]]:
    """The lines of a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forkserver.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [*map(json.loads, done.stdout.splitlines())]


def check_ranks(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """Each of two ranks has sums of its own, and is ready when it can run the largest steps."""
    assert found["same"]
    steps, counts = found["steps"], found["counts"]
    assert steps["memory of ranks"] == ["_shots_kernel", "_words_kernel"]
    assert steps.keys() > {name for name in alone["steps"] if "quick" not in name.lower()}
    start = set(steps["start of ranks"])
    assert start > {"_shots_kernel", "_words_kernel", "_choose_greedy_kernel", "_decode_kernel"}
    assert counts["_embed_kernel"] == alone["counts"]["_embed_kernel"] == 1
    for kernel in ("_shots_kernel", "_words_kernel"):
        assert counts[kernel] % 2 == 0
    assert counts["_settle_kernel"] == alone["counts"]["_settle_kernel"]


def test_all_steps_of_a_start_run_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Of layers that are alike few are run, and the same variants are launched as of all."""
    models = [f"{GOLDEN / model}=bfloat16" for model in MODELS]
    *alone, ranks = rehearsals(tmp_path, *models, f"{GOLDEN / 'llama-gqa'}=bfloat16=2")
    check_ranks(ranks, alone[0])
    found = dict(zip(MODELS, alone, strict=True))
    for model, rehearsed in found.items():
        assert rehearsed["same"], model
        assert rehearsed["unloaded"] == [], model
        # Three rows are an odd number of numbers: what follows them is aligned all the same.
        assert rehearsed["others"] == [], model
        steps = {
            name.replace("<Choice.", "").split(":")[0] + " quick" * ("ATTENTION" in name): kernels
            for name, kernels in rehearsed["steps"].items()
        }
        # A first token's is first; then the largest steps of both kinds, for all others.
        assert [*steps][:6] == [
            "(64, 0, 1, GREEDY quick",
            "quick steps",
            "(3, 3, 0, GREEDY",
            "(1, 1, 0, GREEDY",
            "(96, 32, 8, GREEDY",
            "(1, 1, 0, RANDOM",
        ]
        # Greedy and random steps of 1, 2 and 3 rows; prompts alone and beside rows; what remains.
        assert {"(3, 3, 0, GREEDY", "(1, 1, 0, RANDOM", "(64, 0, 1, GREEDY"} <= set(steps)
        assert {"DecodeGraphs others", "GraphSteps others"} <= set(steps)
        assert "_choose_greedy_kernel" in steps["(3, 3, 0, GREEDY"]
        assert {"_decode_inputs_kernel", "_embed_kernel"} <= set(steps["(3, 3, 0, GREEDY"])
        assert {"_peaks_kernel", "_settle_kernel"} <= set(steps["(1, 1, 0, RANDOM"])
        # Logits of 16 and of 32 bits, with adjustments of any kind and without.
        assert rehearsed["counts"]["_settle_kernel"] == 4
        assert "_decode_kernel" in steps["(3, 3, 0, GREEDY"]
        assert "_decode_kernel" not in steps["(64, 0, 1, GREEDY"]
        quick = set(steps["(64, 0, 1, GREEDY quick"])
        assert {"_embed_kernel", "_prefill_kernel"} <= quick
        assert not quick & {"_linear_kernel", "_hopper_prefill_kernel"}
        assert quick >= set(steps["quick steps"])
        # What a first token needs comes before all else.
        needs = rehearsed["needs"]
        assert {needs[kernel] for kernel in quick} == {"FIRST"}
        assert needs["_decode_kernel"] == "SOON"
        assert needs["_settle_kernel"] == "LATER"
    assert found["mixtral-tiny"]["steps"].keys() == found["llama-gqa"]["steps"].keys()


def test_quantised_weights_are_rehearsed_by_what_their_tensors_say(tmp_path: Path) -> None:
    """Their numbers are not read. Others need no files but the config, or none that are whole."""
    config = {"max_position_embeddings": 128}
    held, _ = packed(llama(), FORMATS["awq"], lambda name: "lm_head" in name)
    awq = write(tmp_path / "awq", held, FORMATS["awq"].settings, **config)
    plain = write(tmp_path / "plain", llama(), **config)
    (plain / "model.safetensors").unlink()
    cloned = write(tmp_path / "cloned", {}, **config)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    (cloned / "model.safetensors").write_bytes(pointer)
    mixed = write_mixed(tmp_path / "mixed.gguf")
    kept = f"{mixed}=bfloat16=1=gguf"
    given = (
        f"{cloned}=bfloat16",
        f"{plain}=bfloat16",
        f"{awq}=bfloat16",
        kept,
        f"{mixed}=bfloat16",
    )
    found = rehearsals(tmp_path / "cache", *given)
    assert all(each["same"] for each in found)
    cloned, plain, awq, blocks, unpacked = (each["counts"] for each in found)
    assert cloned == plain
    assert awq["_linear_kernel"] > 0
    assert blocks["_linear_kernel"] > awq["_linear_kernel"]
    # Of many rows blocks become numbers; of few, numbers of so small a model are cuBLAS's.
    assert blocks["_numbers_kernel"] > 0
    assert not {"_linear_kernel", "_numbers_kernel"} & {*plain, *unpacked}


def test_wide_heads_are_rehearsed(tmp_path: Path) -> None:
    """Prompts of heads of 256 with a softcap have tiles that depend on the GPU."""
    config = json.loads((GOLDEN / "gemma2-caps" / "config.json").read_text())
    config |= {"head_dim": 256, "max_position_embeddings": 128}
    model = write(tmp_path / "wide", {}, **config)
    (found,) = rehearsals(tmp_path / "cache", f"{model}=bfloat16")
    assert found["counts"]["_prefill_kernel"] > 0
    # Three programs of two warps leave more than a thread can have.
    assert found["registers"]["_decode_kernel"] == 255


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((4096, 14336, 32, 8), ("int4=fp8=256", "int4=auto=64", "int8=auto=64", "fp8=int8=512")),
        # Attention of few rows of narrow heads is launched at other moments than that of more.
        ((896, 4864, 14, 2), ("int8=auto=64", "=auto=256")),
        ((1024, 4096, 16, 4), ("=auto=64", "int4=auto=64")),
    ],
    ids=["heads of 128", "heads of 64", "more heads of 64"],
)
def test_steps_of_all_sizes_are_compiled_ahead(
    sizes: tuple[int, int, int, int], settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights and caches of few bits have other kernels for some numbers of tokens and prompts."""
    hidden, intermediate, heads, kv_heads = sizes
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    # Of two layers, since the last one may be run on the few tokens whose logits are wanted.
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = rehearsals(tmp_path / "cache", str(tmp_path), *settings, script="sizes_ahead.py")
    for setting, told in zip(settings, found, strict=True):
        assert told["known"] > 8, setting
        assert told["quick"] == told["without_graphs"] == [], setting


def test_chains_of_one_row_are_rehearsed_to_the_next_layer_and_to_the_end(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama-gqa/config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 12288, "num_attention_heads": 16}
    more = {"num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 3}
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | sizes | more))
    (found,) = rehearsals(tmp_path, f"{folder}=bfloat16=1=fp8")
    steps = [name for name, kernels in found["steps"].items() if "_chain_kernel" in kernels]
    assert steps
    assert all(name.startswith("(1, 1, 0, ") for name in steps)
    assert found["counts"]["_chain_kernel"] == 2
