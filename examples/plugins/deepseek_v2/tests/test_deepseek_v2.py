"""Tiny random DeepSeek-V2 and V3 through the whole engine, against transformers' classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import assert_nearly
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check.preflight import check_model
from engine_core.configs import HFConfig
from engine_core.engine.timings import Timings
from engine_core.errors import ConfigError, OptionError
from engine_core.registry import build_registry
from engine_core_deepseek_v2.model import attention_scale

VOCAB, LONGEST, NEW_TOKENS = 101, 64, 8
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": LONGEST,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "attn_implementation": "eager",
}
# As DeepSeek-V2-Lite has it, and with the groups of DeepSeek-V3.
CONFIGS = {
    "v2": DeepseekV2Config(**SIZES, q_lora_rank=None, rope_parameters=YARN),
    "v3": DeepseekV3Config(
        **SIZES, q_lora_rank=32, rope_parameters=YARN, n_group=4, topk_group=2, num_mtp_layers=1
    ),
}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what transformers makes of them, computed anew at each step."""

    token_ids: list[int]
    continuation: list[int]
    logits: torch.Tensor  # [prompt length + NEW_TOKENS - 1, VOCAB]


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    prompts: list[Prompt]


def expected(model: Any, token_ids: list[int]) -> Prompt:
    sequence = list(token_ids)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
        sequence.append(int(logits[-1].argmax()))
    return Prompt(token_ids, sequence[len(token_ids) :], logits)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    with torch.inference_mode():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() > 1:
                tensor.copy_(torch.randn_like(tensor) * 1.5 * tensor.shape[-1] ** -0.5)
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.add_(0.3 * torch.randn_like(tensor))
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
        folder = tmp_path_factory.mktemp(request.param)
        model.save_pretrained(folder)
        generator = torch.Generator().manual_seed(1)
        prompts = [
            expected(model, torch.randint(0, VOCAB, (length,), generator=generator).tolist())
            for length in (1, 11, 17, LONGEST - NEW_TOKENS)
        ]
    return Checkpoint(folder, prompts)


def check(folder: Path, prompts: list[Prompt], **settings: Any) -> None:
    """All prompts in one batch: the same tokens, and every logit within 1e-4."""
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([prompt.token_ids for prompt in prompts], PARAMS)
    for output, prompt in zip(outputs, prompts, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == prompt.continuation
        rows = [*output.prompt_logprobs[1:], *completion.logprobs]
        reported = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])
        torch.testing.assert_close(reported, prompt.logits.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 8, "block_size": 7}],
    ids=["batched", "chunks-of-8-in-blocks-of-7"],
)
def test_tokens_and_logits_are_those_of_transformers(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    check(checkpoint.folder, checkpoint.prompts, **settings)


def test_a_second_run_from_the_prefix_cache_is_the_same_and_steps_are_recorded(
    checkpoint: Checkpoint,
) -> None:
    prompt = checkpoint.prompts[2]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(checkpoint.folder), skip_tokenizer_init=True, block_size=4) as llm:
        [first] = llm.generate(prompt.token_ids, params)
        [second] = llm.generate(prompt.token_ids, params)
        ways = Timings(llm.engine.core.stats().timings).steps()
    assert first.metrics.num_cached_tokens == 0
    assert second.metrics.num_cached_tokens == 16
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == prompt.continuation
    assert ways["graph" if torch.cuda.is_available() else "recorded"] > 0


@pytest.mark.parametrize("swap_space", ["0", "16MiB"])
def test_tokens_after_a_preemption_are_the_same(checkpoint: Checkpoint, swap_space: str) -> None:
    settings = {"skip_tokenizer_init": True, "block_size": 4, "max_num_batched_tokens": 64}
    # Blocks for one sequence of the longest length, of two layers of 40 numbers of 4 bytes a token.
    memory = (1 + LONGEST // 4) * 4 * 2 * 40 * 4
    limits = {"kv_cache_memory": memory, "swap_space": swap_space}
    # Four begin in 3 blocks each, and end in 5.
    prompts = [checkpoint.prompts[1]] * 5 + [checkpoint.prompts[2]]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(checkpoint.folder), enable_prefix_caching=False, **settings, **limits) as llm:
        # On a CPU no step is left in flight by itself.
        llm.engine.core.depth = 2
        outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
        assert llm.engine.scheduler.num_preemptions > 0
        assert (llm.engine.scheduler.num_swaps > 0) == (swap_space != "0")
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.outputs[0].token_ids == prompt.continuation


def test_int8_weights_choose_nearly_the_same(checkpoint: Checkpoint) -> None:
    # The second token comes from a step in which every row decodes.
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=VOCAB)
    prompts = checkpoint.prompts
    with LLM(str(checkpoint.folder), skip_tokenizer_init=True, quantization="int8") as llm:
        outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        found, _ = output.outputs[0].logprobs
        assert_nearly(found, prompt.logits[len(prompt.token_ids) - 1])


def test_the_check_states_a_latent_vector_and_a_rotated_key_of_each_layer(
    checkpoint: Checkpoint,
) -> None:
    settings = EngineConfig(skip_tokenizer_init=True, dtype="bfloat16", device="cpu")
    report = check_model(str(checkpoint.folder), settings)
    assert report.errors == ()
    assert report.memory is not None
    assert report.memory.kv_bytes_per_token == 2 * (32 + 8) * 2
    assert [group.kind for group in report.memory.groups] == ["LatentCacheSpec"]
    coded = check_model(str(checkpoint.folder), settings.replace(kv_cache_dtype="int8"))
    assert "a cache of latent vectors has no codes" in coded.errors[0].message
    with pytest.raises(OptionError, match="a cache of latent vectors has no codes"):
        LLM(str(checkpoint.folder), settings.replace(kv_cache_dtype="int8"))


@pytest.mark.parametrize("checkpoint", ["v3"], indirect=True)
def test_published_files_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Attention as 8-bit floats in blocks, and a layer that predicts a further token."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, attn_implementation="eager")
    tensors = load_file(checkpoint.folder / "model.safetensors")
    parts = model.state_dict()
    for name in [name for name in tensors if "self_attn" in name and "norm" not in name]:
        scale = tensors[name].abs().max() / 448
        codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
        parts[name].copy_(codes.float() * scale)
        tensors[name] = codes
        tensors[name.replace(".weight", ".weight_scale_inv")] = scale.view(1, 1)
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1", "layers.2")] = tensors[name].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((checkpoint.folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.inference_mode():
        prompts = [expected(model, prompt.token_ids) for prompt in checkpoint.prompts[:3]]
    check(tmp_path, prompts)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v2", {"topk_method": "noaux_tc"}, "'noaux_tc' is not one of greedy, group_limited"),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is True; .* knows only False"),
        ("v2", {"topk_method": "group_limited_greedy"}, "n_group must be a positive integer"),
        ("v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2 and num_attention_heads 4"),
        ("v2", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; .* knows only sigmoid"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("v3", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    architecture = "DeepseekV2ForCausalLM" if name == "v2" else "DeepseekV3ForCausalLM"
    values = {**CONFIGS[name].to_dict(), "architectures": [architecture], **change}
    with pytest.raises(ConfigError, match=message):
        build_registry(plugin_errors="strict").model_config(HFConfig(values))


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_only_yarn_scales_the_scores(kind: str) -> None:
    rope = {**YARN, "rope_type": kind}
    values = {**CONFIGS["v2"].to_dict(), "architectures": ["DeepseekV2ForCausalLM"]}
    config = build_registry(plugin_errors="strict").model_config(
        HFConfig({**values, "rope_parameters": rope})
    )
    theirs = yarn_apply_mscale(rope, CONFIGS["v2"].qk_head_dim ** -0.5)
    assert attention_scale(config.hf_config) == pytest.approx(theirs)


def test_null_is_no_where_transformers_reads_it_so() -> None:
    values = {**CONFIGS["v3"].to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    keys = ("norm_topk_prob", "rope_interleave")
    registry = build_registry(plugin_errors="strict")
    config = registry.model_config(HFConfig({**values, **dict.fromkeys(keys)}))
    for key in keys:
        theirs = getattr(DeepseekV3Config(**{**values, key: None}), key)
        assert bool(getattr(config.hf_config, key)) == bool(theirs)
        with pytest.raises(ConfigError, match=f"{key} must be true or false, got 'no'"):
            registry.model_config(HFConfig({**values, key: "no"}))


def test_published_configs_mean_what_transformers_reads() -> None:
    """Keys of DeepSeek-V3's config, as published in 2024."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    config = build_registry(plugin_errors="strict").model_config(HFConfig(published))
    theirs = DeepseekV3Config(**published)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.head_dim == theirs.qk_head_dim == 192
    for key in ("rms_norm_eps", "rope_interleave", "attention_bias", "tie_word_embeddings"):
        assert getattr(config.hf_config, key) == getattr(theirs, key)
