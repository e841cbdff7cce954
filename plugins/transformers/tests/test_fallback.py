"""Models by transformers' own code: the same tokens as its generate, or a refusal that says why."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fallback_models import TOLERANCE, VOCAB, difference, expected, make_checkpoint, prompts
from golden_fixtures import GOLDEN, golden_prompts
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, Olmo2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral import modeling_mistral
from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb

from engine_core import LLM, SamplingParams
from engine_core.check import check_model
from engine_core.configs import EngineConfig
from engine_core.engine.export import export_model
from engine_core.errors import UnknownArchitectureError
from engine_core_transformers import model as fallback
from engine_core_transformers.merged import GatedMLP, Part

# Between them and those of test_parts_of_known_kinds_are_ours: biases, a head with a bias and
# half-rotated heads; merged experts; norms on both sides, soft caps and windows; latent attention
# with values of another size; a fused qkv; layers with heads of their own sizes, and some that take
# the keys of an earlier one.
EQUAL = {
    "phi": "PhiForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
}

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mamba": ("mamba", "MambaForCausalLM", {}, "keeps a state|num_attention_heads"),
    "linear attention": ("minimax", "MiniMaxForCausalLM", {}, "'linear_attention'"),
    "sinks": ("gpt_oss", "GptOssForCausalLM", {}, "'s_aux'"),
    "both directions": ("bert", "BertLMHeadModel", {"is_decoder": False}, "sees later tokens"),
    "its own attention": ("falcon", "FalconForCausalLM", {}, "not go through"),
    "twice in a layer": ("diffllama", "DiffLlamaForCausalLM", {}, "attends twice"),
    "chunks": ("llama4_text", "Llama4ForCausalLM", {}, "'chunked_attention'"),
    "dynamic rope": (
        "llama",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "type 'dynamic'",
    ),
}


def engine(folder: Path, **settings: Any) -> LLM:
    settings = {"model_impl": "transformers", **settings}
    return LLM(
        folder, skip_tokenizer_init=True, kv_cache_memory="16MiB", max_model_len=96, **settings
    )


@pytest.mark.parametrize("model_type", EQUAL)
def test_tokens_and_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, model_type, EQUAL[model_type])
    answers = [expected(model, prompt) for prompt in prompts()]
    assert difference(tmp_path, answers) <= TOLERANCE


def test_a_config_may_ask_for_other_outputs(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "mixtral", "MixtralForCausalLM")
    answers = [expected(model, prompt) for prompt in prompts()]
    asked = dict.fromkeys(("output_router_logits", "output_hidden_states"), True)
    edit(tmp_path, return_dict=False, **asked)
    assert difference(tmp_path, answers) <= TOLERANCE


def test_a_dtype_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    """Apertus makes parameters of its config's dtype, which is float32 in the checkpoint."""
    model = make_checkpoint(tmp_path, "apertus", "ApertusForCausalLM").to(torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=VOCAB)
    with engine(tmp_path, dtype="bfloat16") as llm:
        outputs = llm.generate(prompts(), params)
    for output, prompt in zip(outputs, prompts(), strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        entry = (output.outputs[0].logprobs or ())[0]
        got = torch.tensor([entry[token].logprob for token in range(VOCAB)])
        assert float((got - wanted).abs().mean()) < 0.05 * float(wanted.std())


def test_two_ranks_give_the_same(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe", "Qwen3MoeForCausalLM")
    answers = [expected(model, prompt) for prompt in prompts()]
    assert difference(tmp_path, answers, tensor_parallel_size=2) <= TOLERANCE


def test_codes_of_experts_become_numbers(tmp_path: Path) -> None:
    """All those that one parameter is made of, with a scale for each of their rows."""
    model = make_checkpoint(tmp_path, "mixtral", "MixtralForCausalLM")
    tensors = load_file(tmp_path / "model.safetensors")
    numbers = dict(tensors)
    for name, weight in numbers.items():
        if re.search(r"experts\..*weight$|_proj\.weight$", name):
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
            numbers[name] = tensors[name].float() * scale
    save_file(numbers, tmp_path / "model.safetensors")
    model = type(model).from_pretrained(tmp_path)
    answers = [expected(model, prompt) for prompt in prompts()]
    save_file(tensors, tmp_path / "model.safetensors")
    edit(tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    settings = EngineConfig(model_impl="transformers", skip_tokenizer_init=True)
    assert not check_model(tmp_path, settings).errors
    assert difference(tmp_path, answers) <= TOLERANCE


def test_kernels_of_codes_may_round_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's of 4 bits computes in bfloat16, and is held to that, whatever dtype is asked for."""
    make_checkpoint(tmp_path, "llama", "LlamaForCausalLM")
    monkeypatch.setitem(fallback._ALONE, torch.float32, -1.0)
    with pytest.raises(UnknownArchitectureError, match="outside of attention"):
        engine(tmp_path, dtype="float32")
    with engine(tmp_path, dtype="float32", quantization="int4") as llm:
        assert llm.generate(prompts()[:1], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    model_type, name, more, reason = REFUSED[case]
    make_checkpoint(tmp_path, model_type, name, **more)
    with pytest.raises(UnknownArchitectureError, match=reason):
        engine(tmp_path)
    report = check_model(tmp_path, EngineConfig(model_impl="transformers"))
    assert any(each.severity == "error" and name in each.message for each in report.problems)


def edit(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {
                "architectures": ["FooForCausalLM"],
                "model_type": "foo",
                "auto_map": {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"},
            },
            "code from there is never run",
        ),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "of that name"),
        ({"model_type": "olmo2"}, "'olmo2' is that of Olmo2ForCausalLM"),
        ({"vision_config": {"depth": 2}}, "pictures or sounds"),
    ],
)
def test_what_transformers_does_not_know_is_refused(
    keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "olmo", "OlmoForCausalLM")
    edit(tmp_path, **keys)
    with pytest.raises(UnknownArchitectureError, match=reason):
        engine(tmp_path, model_impl="auto")


def test_a_config_of_which_transformers_makes_no_model_is_not_blamed_on_its_code(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path, "olmo2", "Olmo2ForCausalLM")
    edit(tmp_path, pad_token_id=999)
    with pytest.raises(UnknownArchitectureError, match="makes no model of this config"):
        engine(tmp_path)


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "olmo2", "Olmo2ForCausalLM")

    def needs(*args: Any, **kwargs: Any) -> None:
        raise ImportError("\nit needs the library timm:\n`pip install timm`")

    monkeypatch.setattr(Olmo2ForCausalLM, "__init__", needs)
    with pytest.raises(
        UnknownArchitectureError, match=r"cannot be imported .*timm: `pip"
    ) as caught:
        engine(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_familys_own_package_that_was_not_asked_is_not_said_to_refuse(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", "LlamaForCausalLM")
    edit(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    asked_first = "engine-core-llama is installed, and with model_impl 'auto' it is asked first"
    with pytest.raises(UnknownArchitectureError, match=asked_first):
        engine(tmp_path)


def test_a_checkpoint_without_a_head_embeds_if_told_its_class(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "olmo2", "Olmo2ForCausalLM").config
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(UnknownArchitectureError, match=r"Olmo2Model: .*'embed'") as told:
        engine(tmp_path, model_impl="auto", task="embed")
    named = re.search(r"hf_overrides (\{.*?\})", str(told.value))
    assert named is not None
    more = {"task": "embed", "hf_overrides": json.loads(named[1])}
    with engine(tmp_path, model_impl="auto", **more) as llm:
        (output,) = llm.embed([prompts()[0]])
    with torch.inference_mode():
        state = model(torch.tensor([prompts()[0]])).last_hidden_state[0, -1]
    wanted = torch.nn.functional.normalize(state, dim=0)
    np.testing.assert_allclose(output.outputs.vector, wanted, atol=1e-5)
    for name, kind in (("ElectraModel", "electra"), ("GPT9LMHeadModel", "gpt2")):
        edit(tmp_path, architectures=[name], model_type=kind)
        with pytest.raises(UnknownArchitectureError, match=f"{name}: .* of that name"):
            engine(tmp_path, model_impl="auto")


def test_it_says_that_it_is_the_fallback_and_what_that_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "olmo", "OlmoForCausalLM")
    with caplog.at_level(logging.WARNING), engine(tmp_path, model_impl="auto"):
        pass
    assert "OlmoForCausalLM is run by transformers' own code" in caplog.text
    assert "slower" in caplog.text
    report = check_model(tmp_path)
    assert [each.severity for each in report.problems if each.code == "fallback"] == ["warning"]
    with pytest.raises(UnknownArchitectureError, match="no installed plugin knows"):
        engine(tmp_path, model_impl="native")


def test_linears_and_vocabulary_are_quantised(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo2", "Olmo2ForCausalLM")

    def kept(model: nn.Module) -> set[str]:
        return {type(part.packed).__name__ for part in model.modules() if hasattr(part, "packed")}

    with engine(tmp_path, quantization="int8") as llm:
        assert llm.apply_model(kept) == [{"Int8Matrix"}]
        [output] = llm.generate([prompts()[2]], SamplingParams(temperature=0, max_tokens=4))
        assert len(output.outputs[0].token_ids) == 4


def test_an_exported_file_of_codes_runs_as_with_the_familys_package(tmp_path: Path) -> None:
    """Its embedding has codes until all weights are there."""
    file = tmp_path / "int8.safetensors"
    export_model(str(GOLDEN / "llama-gqa"), file, EngineConfig(quantization="int8"))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    given = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    found = []
    for implementation in ("native", "transformers"):
        config = EngineConfig(
            model_impl=implementation, skip_tokenizer_init=True, max_model_len=160
        )
        with LLM(str(file), config) as llm:
            # One by one: a few rows together are rounded otherwise.
            outputs = [llm.generate(each, params)[0].outputs[0].token_ids for each in given]
        found.append(outputs)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("olmo2", "Olmo2ForCausalLM"),
        pytest.param("qwen3_moe", "Qwen3MoeForCausalLM", marks=pytest.mark.long),
    ],
)
def test_decode_steps_are_repeated_without_the_models_python(
    model_type: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_core_transformers.model import TransformersModel

    pytest.importorskip("numba")
    make_checkpoint(tmp_path, model_type, name)
    runs = []
    forward = TransformersModel.forward

    def counted(self: TransformersModel, *args: Any, **kwargs: Any) -> torch.Tensor:
        runs.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TransformersModel, "forward", counted)
    with engine(tmp_path) as llm:
        runs.clear()
        llm.generate([prompts()[2]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert len(runs) < 10


def test_a_model_without_a_plan_runs_on_one_rank_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "opt", "OPTForCausalLM")
    report = check_model(tmp_path, EngineConfig(model_impl="transformers", tensor_parallel_size=2))
    assert any("has no plan in transformers" in each.message for each in report.problems)


def test_deterministic_mode_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo", "OlmoForCausalLM")
    config = EngineConfig(model_impl="transformers", deterministic=True)
    report = check_model(tmp_path, config, gpu="H100")
    assert any("deterministic: OlmoForCausalLM" in each.message for each in report.problems)


def test_tokens_that_reach_each_other_outside_of_attention_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo.modeling_olmo import OlmoMLP

    make_checkpoint(tmp_path, "olmo", "OlmoForCausalLM")
    forward = OlmoMLP.forward

    def shifted(self: nn.Module, x: torch.Tensor) -> Any:
        return forward(self, (x + x.roll(1, dims=1)) / 2)

    monkeypatch.setattr(OlmoMLP, "forward", shifted)
    with pytest.raises(UnknownArchitectureError, match="outside of attention"):
        engine(tmp_path)


def test_a_model_that_counts_positions_itself_is_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "bart", "BartForCausalLM")
    with pytest.raises(UnknownArchitectureError, match="counts positions by the tokens"):
        engine(tmp_path)


def ours(llm: LLM) -> tuple[int, int, int, int, int]:
    """Norms, rotations, layers, feed-forward parts, and merged linears of attention of ours."""

    def count(model: nn.Module) -> tuple[int, int, int, int, int]:
        changed = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
        kinds = [sum(kind in name for name in changed) for kind in ("Norm", "Attention", "Layer")]
        assert sum(kinds) == len(changed)
        norms, rotations, layers = kinds
        parts = [m for m in model.modules() if isinstance(m, Part)]
        mlps = sum(isinstance(m, GatedMLP) for m in model.modules())
        return norms, rotations, layers, mlps, len(parts)

    (found,) = llm.apply_model(count)
    return found


@pytest.mark.parametrize(
    ("model_type", "name", "wanted"),
    [
        ("qwen3", "Qwen3ForCausalLM", (13, 3, 3, 3, 9)),  # with norms of queries and of keys
        ("gemma2", "Gemma2ForCausalLM", (13, 3, 3, 3, 9)),  # with 1 added to the weights of norms
        ("gpt_neox", "GPTNeoXForCausalLM", (0, 3, 0, 0, 0)),  # with a part of each head rotated
        ("cohere", "CohereForCausalLM", (0, 3, 0, 3, 9)),  # with neighbours that turn
        (
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (13, 0, 3, 3, 6),
        ),  # with rotated keys of another shape
    ],
)
def test_parts_of_known_kinds_are_ours(
    model_type: str, name: str, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, model_type, name)
    with engine(tmp_path) as llm:
        assert ours(llm) == wanted
    assert difference(tmp_path, [expected(model, p) for p in prompts()]) <= TOLERANCE


def _no_eps(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


def _turned_twice(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    for _ in range(2):
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k


def _take_cache(kwargs: dict[str, Any]) -> Any:
    """The cache of an attention's arguments, by its name since transformers 5.24 or before."""
    return kwargs.pop("cache", kwargs.pop("past_key_values", None))


def _keys_are_values(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    cache = _take_cache(kwargs)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    key = value = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    out, _ = attend(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _keys_of_the_layer_before(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    cache = _take_cache(kwargs)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    if self.layer_idx == 0:
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        self.config.kept = key, value
    else:
        key, value = self.config.kept
        query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    out, _ = attend(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _limited(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))


def _halved(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + out / 2
    out = self.mlp(self.post_attention_layernorm(hidden_states))
    return hidden_states + out


def _counted(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    count = hidden_states.shape[1]
    normed = self.input_layernorm(hidden_states)
    out, _ = self.self_attn(hidden_states=normed, batch_size=count, **kwargs)
    hidden_states = hidden_states + out
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("part", "name", "code", "wanted"),
    [
        ("MistralRMSNorm", "forward", _no_eps, (0, 3, 0, 3, 9)),
        (None, "apply_rotary_pos_emb", _turned_twice, (7, 0, 3, 3, 9)),
        ("MistralAttention", "forward", _keys_are_values, (7, 0, 3, 3, 6)),
        ("MistralAttention", "forward", _keys_of_the_layer_before, (7, 1, 3, 3, 3)),
        ("MistralMLP", "forward", _limited, (7, 3, 3, 0, 9)),
        ("MistralDecoderLayer", "forward", _halved, (7, 3, 0, 3, 9)),
        ("MistralDecoderLayer", "forward", _counted, (7, 3, 0, 3, 9)),
    ],
)
def test_code_of_another_kind_stays_the_models_own(
    part: str | None,
    name: str,
    code: Any,
    wanted: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(getattr(modeling_mistral, part) if part else modeling_mistral, name, code)
    model = make_checkpoint(tmp_path, "mistral", "MistralForCausalLM", sliding_window=None)
    model.set_attn_implementation("sdpa")
    with engine(tmp_path) as llm:
        assert ours(llm) == wanted
    assert difference(tmp_path, [expected(model, p) for p in prompts()]) <= TOLERANCE
