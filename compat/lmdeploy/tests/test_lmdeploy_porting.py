"""A model file in lmdeploy's style, with only its imports changed, and what is refused."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    check_generation,
    check_output,
    golden_llm,
    golden_prompts,
    greedy_params,
    with_settings,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import engine_core_lmdeploy as lmdeploy
from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import WeightsMismatchError
from engine_core.runtime.loader import build_on_meta, check_weights, load_weights
from engine_core.step_context import BuildContext, building
from engine_core_lmdeploy import distributed

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "README.md"
LLAMA = HERE / "lmdeploy_style_llama.txt"
QWEN = HERE / "lmdeploy_style_qwen.txt"
EXPERTS = HERE / "lmdeploy_style_experts.txt"
# The class, the files that it is in, and the architectures that it takes over.
FILES = {
    "MyQwenForCausalLM": ((QWEN,), ("Qwen2ForCausalLM", "Qwen3ForCausalLM")),
    "MyMoEForCausalLM": (
        (QWEN, EXPERTS),
        ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    ),
}
SETTINGS = {
    "default": {},
    "chunks-of-8": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
}


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The file after the document's command, as a module map that names one of its classes."""
    folder = tmp_path_factory.mktemp("ported")
    command = re.search(r"^sed .*$", DOCUMENT.read_text(), re.MULTILINE)
    assert command is not None

    def make(name: str) -> str:
        sources, architectures = FILES.get(name, ((LLAMA,), ("LlamaForCausalLM",)))
        source = "".join(each.read_text() for each in sources)
        file = folder / name / "my_model.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
        subprocess.run(command[0], shell=True, check=True, cwd=file.parent)
        ours, theirs = file.read_text().splitlines(), source.splitlines()
        changed = [(line, other) for line, other in zip(ours, theirs, strict=True) if line != other]
        assert len(changed) >= 5
        for line, other in changed:
            own = ("from engine_core_lmdeploy import ", "import engine_core_lmdeploy.")
            assert line.startswith(own)
            assert other.startswith(("from lmdeploy.", "from .", "import lmdeploy."))
        with file.open("a") as lines:
            lines.write(f"MODULE_MAP = {dict.fromkeys(architectures, name)}\n")
        return str(file)

    return make


@pytest.mark.parametrize(
    ("name", "settings"),
    with_settings(["llama-gqa", "llama-tied-llama3", "llama-yarn", "llama-bias-linear"], SETTINGS),
)
def test_a_ported_file_gives_the_logits_of_transformers(
    ported: Callable[[str], str], name: str, settings: dict[str, Any]
) -> None:
    module_map = ported("MyForCausalLM")
    check_generation(name, {"custom_module_map": module_map, **settings})


@pytest.mark.parametrize(
    ("name", "settings"),
    with_settings(["qwen2-gqa", "qwen2-tied-nowindow", "qwen3-tiny"], SETTINGS),
)
def test_the_manner_of_newer_files_runs(
    ported: Callable[[str], str], name: str, settings: dict[str, Any]
) -> None:
    """Layers with prefixes, an embedding and a head that are built by functions."""
    check_generation(name, {"custom_module_map": ported("MyQwenForCausalLM"), **settings})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral-tiny", SETTINGS["chunks-of-8"]),
        ("qwen2moe-shared", SETTINGS["default"]),
        pytest.param("mixtral-tiny", SETTINGS["default"], marks=pytest.mark.long),
        pytest.param("qwen2moe-shared", SETTINGS["chunks-of-8"], marks=pytest.mark.long),
    ],
)
def test_experts_load_by_their_numbers(
    ported: Callable[[str], str], name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, {"custom_module_map": ported("MyMoEForCausalLM"), **settings})


@pytest.mark.parametrize(
    ("name", "by_experts"), [("mixtral-tiny", True), ("qwen2moe-shared", False)]
)
def test_experts_on_two_ranks(ported: Callable[[str], str], name: str, by_experts: bool) -> None:
    """Their sum over the ranks is the layer's, or with a shared expert the file's."""
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": by_experts}
    check_generation(name, {"custom_module_map": ported("MyMoEForCausalLM"), **settings})


def test_a_checkpoint_that_transformers_wrote(ported: Callable[[str], str], tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    theirs = Qwen3MoeForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    prompt = [5, 17, 90, 3, 44]
    with torch.inference_mode():
        tokens = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )[0]
        logits = theirs(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=96)
    module_map = ported("MyMoEForCausalLM")
    with LLM(str(tmp_path), skip_tokenizer_init=True, custom_module_map=module_map) as llm:
        (completion,) = llm.generate([prompt], params)[0].outputs
    assert completion.token_ids == tokens[len(prompt) :].tolist()
    given = [[step[token].logprob for token in range(96)] for step in completion.logprobs]
    torch.testing.assert_close(torch.tensor(given), logits, atol=1e-4, rtol=0)


def test_a_tied_head_is_whole_on_each_of_two_ranks(ported: Callable[[str], str]) -> None:
    settings = {"custom_module_map": ported("MyQwenForCausalLM"), "tensor_parallel_size": 2}
    check_generation("qwen2-tied-nowindow", settings)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tensors_that_a_checkpoint_has_fused_are_taken_apart(
    ported: Callable[[str], str], tmp_path: Path, quantization: str | None
) -> None:
    """A parameter's weight_spliter gives the parts of its own layer."""
    own = GOLDEN / "qwen3-tiny"
    tensors = load_file(own / "model.safetensors")
    for name in list(tensors):
        for first, rest, fused in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if first in name:
                parts = [name, *(name.replace(first, other) for other in rest)]
                joined = torch.cat([tensors.pop(part) for part in parts])
                tensors[name.replace(first, fused)] = joined
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(own / "config.json")
    prompts = [prompt.input_ids for prompt in golden_prompts("qwen3-tiny")]
    params = greedy_params("qwen3-tiny")
    settings = {"custom_module_map": ported("MyQwenForCausalLM"), "quantization": quantization}
    with golden_llm("qwen3-tiny", **settings) as llm:
        expected = llm.generate(prompts, params)
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=160, **settings) as llm:
        outputs = llm.generate(prompts, params)
    for output, prompt, other in zip(outputs, golden_prompts("qwen3-tiny"), expected, strict=True):
        if quantization is None:
            check_output(output, prompt)
        assert output.outputs[0].token_ids == other.outputs[0].token_ids


def test_the_guides_own_shape_runs(ported: Callable[[str], str]) -> None:
    """No mixin, and logits from forward."""
    check_generation("llama-gqa", {"custom_module_map": ported("GuideForCausalLM")})


def test_update_weights_is_called_without_a_mixin(ported: Callable[[str], str]) -> None:
    """A model without a base ties its head where lmdeploy's loader would have it do so."""
    module_map = Path(ported("GuideForCausalLM"))
    with module_map.open("a") as lines:
        lines.write(
            "class TiedForCausalLM(GuideForCausalLM):\n"
            "    def update_weights(self):\n"
            "        self.lm_head.weight = self.model.embed_tokens.weight\n"
            'MODULE_MAP = {"LlamaForCausalLM": "TiedForCausalLM"}\n'
        )
    check_generation("llama-tied-llama3", {"custom_module_map": str(module_map)})


@pytest.mark.slow
def test_a_ported_file_runs_on_two_ranks(ported: Callable[[str], str]) -> None:
    settings = {"custom_module_map": ported("MyForCausalLM"), "tensor_parallel_size": 2}
    check_generation("llama-gqa", settings)


def test_dynamic_scaling_is_refused(ported: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="dynamic NTK scaling is not supported"):
        golden_llm("llama-dynamic", custom_module_map=ported("MyForCausalLM"))


def linear(name: str, **more: Any) -> Callable[[], object]:
    def build() -> object:
        function = getattr(lmdeploy, name)
        sizes = [4, 4] if name in ("build_gateup_linear", "build_merged_colwise_linear") else 8
        return function(4, sizes, False, **more)

    return build


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name} quant_config": (linear(name, quant_config={"bits": 4}), "quant_config")
        for name in (
            "build_linear",
            "build_colwise_linear",
            "build_rowwise_linear",
            "build_o_proj",
            "build_down_linear",
            "build_merged_colwise_linear",
            "build_gateup_linear",
        )
    },
    "qkv quant_config": (
        lambda: lmdeploy.build_qkv_proj(4, 2, 2, 2, quant_config={"bits": 4}),
        "quant_config",
    ),
    "qkv replicate": (
        lambda: lmdeploy.build_qkv_proj(4, 2, 2, 2, num_replicate_kv_heads=2),
        "num_replicate_kv_heads=2",
    ),
    "align": (linear("build_colwise_linear", tp_align_size=8), "tp_align_size=8"),
    "unsummed bias": (
        lambda: lmdeploy.build_o_proj(4, 8, True, is_tp=True, all_reduce=False),
        "all_reduce=False",
    ),
    "experts quant_config": (
        lambda: lmdeploy.build_fused_moe(4, 8, 2, 1, quant_config={"bits": 4}),
        "quant_config",
    ),
    "experts bias": (lambda: lmdeploy.build_fused_moe(4, 8, 2, 1, bias=True), "bias=True"),
    "experts act_func": (
        lambda: lmdeploy.FusedMoE(4, 8, 2, 1, act_func=torch.relu),
        "act_func=",
    ),
    "experts part": (
        lambda: lmdeploy.load_weight(nn.Parameter(), torch.ones(1), shard_id="w1", expert_id=0),
        "shard_id='w1'",
    ),
    "router groups": (lambda: lmdeploy.SoftmaxTopK(4, n_groups=2), "n_groups=2"),
    "router dim": (lambda: lmdeploy.SoftmaxTopK(4, dim=0), "dim=0"),
    "balancing": (lambda: lmdeploy.EPLBManager.num_physical_experts(), "load balancing"),
    "all_reduce group": (
        lambda: distributed.all_reduce(torch.ones(1), group="mlp"),
        "group='mlp'",
    ),
    "out_names": (linear("build_gateup_linear", out_names=["gate"]), "1 out_names for 2"),
    "norm quant_config": (lambda: lmdeploy.RMSNorm(4, quant_config={"bits": 8}), "quant_config"),
    "norm group": (lambda: lmdeploy.RMSNorm(4, all_reduce_group="attn"), "all_reduce_group"),
    "not causal": (lambda: lmdeploy.Attention(2, 4, causal=False), "causal=False"),
    "mla": (lambda: lmdeploy.Attention(2, 4, use_flash_mla=True), "use_flash_mla"),
    "sinks": (lambda: lmdeploy.Attention(2, 4, learnable_sink=True), "learnable_sink"),
    "window": (lambda: lmdeploy.Attention(2, 4, sliding_window=0), "sliding_window=0"),
    "unknown": (lambda: lmdeploy.Attention(2, 4, block_sparse=7), "block_sparse=7"),
    "embedding dtype": (
        lambda: lmdeploy.ParallelEmbedding(8, 4, None, force_dtype=torch.float64),
        "force_dtype",
    ),
    "padding": (lambda: lmdeploy.ParallelEmbedding(8, 4, 8), "padding_idx=8"),
    "head bias": (lambda: lmdeploy.ParallelLMHead(8, 4, bias=True), "bias=True"),
    **{
        f"rope {kind.name}": (
            lambda kind=kind: lmdeploy.build_rotary_embedding(8, emb_type=kind),
            f"RopeType.{kind.name}",
        )
        for kind in (
            lmdeploy.RopeType.DynamicNTKScaling,
            lmdeploy.RopeType.LongRoPEScaling,
            lmdeploy.RopeType.Fope,
        )
    },
    "rope no enum": (lambda: lmdeploy.build_rotary_embedding(8, emb_type="yarn"), "'yarn'"),
    "rope factor": (
        lambda: lmdeploy.build_rotary_embedding(8, scaling_factor=2.0),
        "scaling_factor=2.0",
    ),
    "mrope": (lambda: lmdeploy.build_rotary_embedding(8, mrope_params=[2, 1, 1]), "mrope_params"),
    "longrope": (
        lambda: lmdeploy.build_rotary_embedding(
            8, longrope_params=lmdeploy.LongRoPEScalingParameters([1.0], [1.0], 64)
        ),
        "longrope_params",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_here_is_refused_by_name(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_scales_of_a_quantised_cache_are_refused() -> None:
    attention = lmdeploy.Attention(2, 4)
    empty = torch.empty(0)
    with pytest.raises(ValueError, match=r"k_scales_zeros=\(3,\)"):
        attention(empty, empty, empty, empty, empty, None, k_scales_zeros=torch.ones(3))


def test_buffers_of_a_captured_graph_are_refused() -> None:
    with pytest.raises(TypeError, match="Model defines fill_buffers_cudagraph"):
        type("Model", (nn.Module, lmdeploy.CudaGraphMixin), {"fill_buffers_cudagraph": None})


PARAMETERS = {
    "default": ({}, {"rope_type": "default"}),
    "linear": (
        {"emb_type": lmdeploy.RopeType.LinearScaling, "scaling_factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "llama3": (
        {
            "emb_type": lmdeploy.RopeType.Llama3,
            "scaling_factor": 8.0,
            "llama3_params": lmdeploy.Llama3Parameters(1.0, 4.0, 32),
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": (
        {
            "emb_type": lmdeploy.RopeType.Yarn,
            "scaling_factor": 4.0,
            "yarn_params": lmdeploy.YarnParameters(beta_fast=16, beta_slow=2),
        },
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    ),
}


@pytest.mark.parametrize(("ours", "theirs"), PARAMETERS.values(), ids=PARAMETERS.keys())
def test_rotation_is_that_of_transformers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Also out of place, where the inputs stay as they were."""
    positions = torch.arange(50).unsqueeze(0)
    q, k = torch.randn(50, 3, 16), torch.randn(50, 2, 16)
    config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=3,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 5000.0, **theirs},
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    wanted = apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)

    rotary = lmdeploy.build_rotary_embedding(16, 64, 5000, **ours)
    our_cos, our_sin = rotary(q, positions)
    torch.testing.assert_close(our_cos, cos, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(our_sin, sin, atol=1e-5, rtol=1e-5)
    q_before, k_before = q.clone(), k.clone()
    rotated = lmdeploy.ApplyRotaryEmb()(q, k, our_cos[0], our_sin[0], inplace=False)
    assert torch.equal(q, q_before)
    assert torch.equal(k, k_before)
    for result, expected in zip(rotated, wanted, strict=True):
        torch.testing.assert_close(result, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    lmdeploy.ApplyRotaryEmb()(q, k, our_cos[0], our_sin[0])
    assert torch.equal(q, rotated[0])


def test_cos_and_sin_have_the_hidden_states_dtype() -> None:
    rotary = lmdeploy.build_rotary_embedding(16, partial_rotary_factor=0.5)
    cos, sin = rotary(torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.arange(3).unsqueeze(0))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos.shape == sin.shape == (1, 3, 8)
    with pytest.raises(ValueError, match=r"position_ids must be \[1, T\], got \(3, 5\)"):
        rotary(torch.zeros(1, 5, 4), torch.zeros(3, 5, dtype=torch.int64))


def test_merged_shards_have_lmdeploys_names() -> None:
    merged = lmdeploy.build_merged_colwise_linear(
        4, [2, 3], bias=False, out_names=("one", "two"), device=torch.device("cpu")
    )
    one, two = torch.randn(2, 4), torch.randn(3, 4)
    lmdeploy.load_weight(merged.weight, two, shard_id="two")
    lmdeploy.load_weight(merged.weight, one, shard_id="one")
    assert torch.equal(merged.weight, torch.cat((one, two)))


def test_the_padding_row_is_zero_and_the_head_can_share_the_matrix() -> None:
    embedding = lmdeploy.ParallelEmbedding(5, 4, -2)
    head = lmdeploy.ParallelLMHead(5, 4)
    head.tie_weights(embedding)
    table = torch.randn(5, 4)
    lmdeploy.load_weight(embedding.weight, table)
    table[3] = 0
    assert torch.equal(embedding(torch.arange(5)), table)
    torch.testing.assert_close(head(table), table @ table.T)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_head_that_is_always_split_can_share_a_whole_matrix(rank: int) -> None:
    """Each rank computes every logit from it, and nothing is gathered."""
    with building(BuildContext(tp_rank=rank, tp_size=2)):
        embedding = lmdeploy.ParallelEmbedding(5, 4, None)
        head = lmdeploy.ParallelLMHead(5, 4)
        split = lmdeploy.build_embedding(5, 4, None, is_tp=True)
    head.tie_weights(embedding)
    table = torch.randn(5, 4)
    lmdeploy.load_weight(embedding.weight, table)
    assert torch.equal(embedding(torch.arange(5)), table)
    torch.testing.assert_close(head(table), table @ table.T)
    assert split.weight.shape == (3, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_merged_linear_takes_a_fused_tensor_apart(rank: int) -> None:
    with building(BuildContext(tp_rank=rank, tp_size=2)):
        merged = lmdeploy.build_gateup_linear(4, [2, 6], bias=True)
    for param in (merged.weight, merged.bias):
        fused = torch.randn(8, *param.shape[1:])
        gate, up = param.weight_spliter(fused)
        assert torch.equal(gate, fused[:2])
        assert torch.equal(up, fused[2:])
        lmdeploy.load_weight(param, gate, shard_id=0)
        lmdeploy.load_weight(param, up, shard_id=1)
        own = torch.cat((fused[rank : rank + 1], fused[2 + 3 * rank : 5 + 3 * rank]))
        assert torch.equal(param, own)
    with pytest.raises(ValueError, match=r"has shape \[9\], the model wants 8 rows"):
        merged.bias.weight_spliter(torch.zeros(9))


def test_names_are_joined_with_dots() -> None:
    assert lmdeploy.add_prefix("mlp", "") == "mlp"
    assert lmdeploy.add_prefix("mlp", "model.layers.0") == "model.layers.0.mlp"


class TinyModel(nn.Module, lmdeploy.DeployModelMixinV1):
    """A head that its base builds and ties."""

    def __init__(self, config: Any, ctx_mgr: object, **kwargs: object) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(6, 4, config.pad_token_id)
        self.lm_head = self.build_lm_head(4, 6, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            lmdeploy.default_weight_loader(parameters[name], tensor)


class _InMemory:
    """A checkpoint with one tensor."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._tensor = (name, tensor)
        self.headers = {name: SimpleNamespace(dtype="float32", shape=tensor.shape)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield self._tensor


def load_tiny(table: Tensor, **config: Any) -> nn.Module:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "num_layers", "num_attention_heads"), 4)
    sizes |= {"num_key_value_heads": 4, "head_dim": 1, "max_position_embeddings": 8}
    model_config = ModelConfig(architecture="Tiny", hf_config=HFConfig(**config), **sizes)
    model = build_on_meta(TinyModel, model_config, BuildContext(dtype=torch.float32))
    source = _InMemory("embed.weight", table)
    check_weights(model, source, "memory")
    load_weights(model, source, "memory", torch.device("cpu"))
    return model


def test_the_mixin_ties_the_head_before_and_after_loading() -> None:
    table = torch.randn(6, 4)
    assert torch.equal(load_tiny(table).get_logits(torch.eye(4)), table.T)
    with pytest.raises(WeightsMismatchError, match=r"missing: lm_head\.weight"):
        load_tiny(table, tie_word_embeddings=False)


def test_a_split_head_cannot_share_a_whole_matrix() -> None:
    class Split(TinyModel):
        def __init__(self, config: Any, ctx_mgr: object, **kwargs: object) -> None:
            super().__init__(config, ctx_mgr)
            self.lm_head = self.build_lm_head(4, 6, bias=False, is_tp=True)

    with building(BuildContext(tp_size=2)):
        model = Split(HFConfig(), None)
    with pytest.raises(ValueError, match=r"the head is \[6, 2\] and the embedding \[6, 4\]"):
        model.update_weights()


def test_every_name_of_the_module_is_in_the_document() -> None:
    document = DOCUMENT.read_text()
    unnamed = [
        name for name in lmdeploy.__all__ if name not in document and name != "AttentionMetadata"
    ]
    assert unnamed == []
