"""The families in examples/module_maps against transformers' classes, with tiny random weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry
from engine_core.testing import ConformanceCase, checks
from engine_core.testing.reference import prepare
from engine_core.testing.subject import Family, Subject

MAPS = Path(__file__).parents[1] / "examples" / "module_maps"
VOCAB, NEW_TOKENS = 96, 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 3.0],
    "long_factor": [1.0, 9.0, 30.0],
}
HALVED = {**LONGROPE, "short_factor": [1.0, 1.5, 3.0, 4.0]}
# For each file: the first of its cases is also run on two ranks and in int8.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "phi3": {
        "long context, partial rotation": {
            "num_attention_heads": 4,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
        },
        "window": {"sliding_window": 7, "rope_theta": 300.0},
    },
    "olmo2": {
        "biases, a key head for both ranks": {
            "attention_bias": True,
            "rope_theta": 700.0,
            "num_key_value_heads": 1,
        },
        "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    },
    "starcoder2": {
        "window": {"sliding_window": 7, "rope_theta": 300.0},
        "no biases, a head of its own": {
            "use_bias": False,
            "tie_word_embeddings": False,
            "norm_epsilon": 1e-3,
        },
    },
    "glm4": {
        "norms on both sides": {"head_dim": 16, "rope_theta": 300.0},
        "no biases": {"head_dim": 8, "attention_bias": False, "partial_rotary_factor": 0.75},
        "older": {"model_type": "glm", "head_dim": 16, "tie_word_embeddings": True},
    },
    "internlm3": {
        "biases": {
            "head_dim": 16,
            "rope_theta": 300.0,
            "qkv_bias": True,
            "bias": True,
            "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        },
        "none": {"head_dim": 8},
    },
    "stablelm": {
        "norms of each head, a key head for both ranks": {
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "qk_layernorm": True,
            "use_qkv_bias": True,
        },
        "side by side": {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    },
}
ALL = [(file, case) for file, cases in CASES.items() for case in cases]
FIRST = [(file, next(iter(cases))) for file, cases in CASES.items()]
ARCHITECTURES = {
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}
PROMPTS = [[5], list(range(10, 19)), [(7 * i) % 90 + 3 for i in range(33)]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function to the folder of a case, and the reference's tokens and logits of a prompt."""

    @functools.cache
    def make(file: str, case: str) -> tuple[Path, list[tuple[list[int], torch.Tensor]]]:
        values = {**SIZES, "model_type": file, **CASES[file][case]}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**values), attn_implementation="eager"
        ).eval()
        for name, param in model.named_parameters():
            bias = name.endswith("bias")
            if param.dim() > 1:
                param.data.normal_(0.0, 1.5 * param.shape[-1] ** -0.5)
            else:
                param.data.normal_(0.0 if bias else 1.0, 0.3)
        folder = tmp_path_factory.mktemp(file)
        model.save_pretrained(folder)
        results = []
        for prompt in PROMPTS:
            ids = list(prompt)
            with torch.inference_mode():
                for _ in range(NEW_TOKENS):
                    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
                    ids.append(int(logits[-1].argmax()))
            results.append((ids[len(prompt) :], logits.log_softmax(-1)))
        return folder, results

    return make


def run(file: str, folder: Path, **settings: Any) -> list[Any]:
    config = EngineConfig(
        custom_module_map=str(MAPS / f"{file}.py"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        **settings,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=VOCAB)
    with LLM(str(folder), config) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


def difference(found: dict[int, Any], wanted: torch.Tensor) -> float:
    return max(abs(found[i].logprob - float(wanted[i])) for i in range(VOCAB))


@pytest.mark.parametrize(("file", "case"), ALL)
def test_a_batch_in_chunks_gives_transformers_tokens_and_logits(
    file: str, case: str, checkpoint: Any
) -> None:
    folder, expected = checkpoint(file, case)
    outputs = run(file, folder, max_num_batched_tokens=8, max_num_seqs=3, block_size=4)
    for output, (tokens, rows), prompt in zip(outputs, expected, PROMPTS, strict=True):
        assert output.token_ids == tokens
        for step, entry in enumerate(output.logprobs):
            assert difference(entry, rows[len(prompt) - 1 + step]) < 1e-4, step


def test_a_window_wider_than_any_sequence_is_none(checkpoint: Any) -> None:
    folder, expected = checkpoint("starcoder2", "no biases, a head of its own")
    outputs = run("starcoder2", folder, hf_overrides={"sliding_window": 2**63})
    for output, (tokens, _) in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens


@pytest.mark.parametrize(("file", "case"), FIRST)
def test_two_ranks_and_int8(file: str, case: str, checkpoint: Any) -> None:
    folder, expected = checkpoint(file, case)
    for output, (tokens, rows), prompt in zip(
        run(file, folder, tensor_parallel_size=2), expected, PROMPTS, strict=True
    ):
        assert output.token_ids == tokens
        assert difference(output.logprobs[0], rows[len(prompt) - 1]) < 1e-4
    for output, (_, rows), prompt in zip(
        run(file, folder, quantization="int8"), expected, PROMPTS, strict=True
    ):
        wanted = rows[len(prompt) - 1]
        assert difference(output.logprobs[0], wanted) < 0.3 * float(wanted.std())


def published(file: str, case: str, **changes: Any) -> dict[str, Any]:
    values = {**SIZES, "model_type": file, **CASES[file][case], **changes}
    return {**values, "architectures": [ARCHITECTURES[values["model_type"]]]}


def registry(file: str) -> Any:
    return build_registry(custom_module_map=[str(MAPS / f"{file}.py")])


def build(file: str, case: str, **changes: Any) -> Any:
    return registry(file).model_config(HFConfig(published(file, case, **changes)))


@pytest.mark.parametrize(("file", "case"), FIRST)
def test_the_kit_on_a_model(file: str, case: str, tmp_path: Path) -> None:
    """Its checks of names, of states and of what a step may do; the others are above."""
    config = published(file, case)
    found = registry(file)
    made = ConformanceCase(name=case, architecture=config["architectures"][0], config=config)
    family = Family(file, found, found.reports[0], (made,))
    subject = Subject(family, made, prepare(made, tmp_path))
    for check in (
        checks.weights,
        checks.logits,
        checks.recomputation,
        checks.no_state,
        checks.no_host_synchronisation,
        checks.state_dict_round_trip,
        checks.bfloat16,
    ):
        subject.run(check)


@pytest.mark.parametrize(
    ("file", "case", "longest"),
    [("phi3", "long context, partial rotation", 64), ("internlm3", "biases", 64)],
)
def test_what_changes_with_the_length_ends_before_it(file: str, case: str, longest: int) -> None:
    config = build(file, case)
    assert config.max_position_embeddings == longest
    assert not config.may_exceed_length


def test_what_phi3_leaves_out_or_says_twice_is_read_as_by_transformers() -> None:
    inside = {**LONGROPE, "original_max_position_embeddings": 16}
    values = published("phi3", "long context, partial rotation", rope_scaling=inside)
    del values["eos_token_id"]
    theirs = AutoConfig.for_model(**values)
    ours = registry("phi3").model_config(HFConfig(values))
    original = theirs.rope_parameters["original_max_position_embeddings"]
    assert ours.max_position_embeddings == original == 64
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize(
    ("file", "case", "changes", "message"),
    [
        ("phi3", "window", {"rope_scaling": {"type": "yarn"}}, "'yarn' is not one of"),
        ("phi3", "window", {"rope_scaling": {**LONGROPE}}, "list of 4 numbers"),
        ("internlm3", "none", {"qkv_bias": 1}, "qkv_bias must be true or false"),
        ("starcoder2", "window", {"sliding_window": "7"}, "sliding_window must be a positive"),
        ("starcoder2", "window", {"rope_theta": 0}, "rope_theta must be a positive"),
        ("starcoder2", "window", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("phi3", "window", {"rope_scaling": {**HALVED, "short_factor": [1, 0, 1, 1]}}, "entry of"),
        ("phi3", "window", {"rope_scaling": {**HALVED, "factor": 0}}, "factor must be a positive"),
        (
            "phi3",
            "window",
            {"rope_scaling": {**HALVED, "attention_factor": "1"}},
            "attention_factor must be a positive number, got '1'",
        ),
        ("glm4", "no biases", {"partial_rotary_factor": 1.5}, "1 at most, got 1.5"),
        (
            "stablelm",
            "side by side",
            {"rope_parameters": {"partial_rotary_factor": "half"}},
            "partial_rotary_factor must be a number above 0, and 1 at most, got 'half'",
        ),
    ],
)
def test_configs_that_are_refused(
    file: str, case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(file, case, **changes)
