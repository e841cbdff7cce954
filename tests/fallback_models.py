"""Tiny random checkpoints of transformers' architectures, and how the fallback compares with them.

The expected tokens and logits are those of transformers' own greedy ``generate``, a prompt at a
time. The engine gets all prompts at once, in chunks, with a cold and then a warm prefix cache.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import EngineError, UnknownArchitectureError

VOCAB, MAX_LENGTH, NEW_TOKENS = 96, 128, 12
# Of log-probabilities. ERNIE 4.5 MoE's differ by 8e-5 between transformers' generate and one pass.
TOLERANCE = 2e-4

# Of these a config takes those that its class knows, each under its own name.
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 12,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What an architecture needs beside them to be small, or to show more of what it does.
_DECODER = {
    "is_encoder_decoder": False, "is_decoder": True, "d_model": 64, "decoder_layers": 3,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 3,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
}  # fmt: skip
_SLIDES_AND_SEES = ["sliding_attention", "full_attention"]
_GEMMA = {
    "num_hidden_layers": 4, "layer_types": 2 * _SLIDES_AND_SEES, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "longcat_flash", "minicpm3", "youtu",
)  # fmt: skip
_BERTS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_BARTS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus",
    "plbart", "whisper",
)  # fmt: skip
_MORE: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_LATENT, _MLA),
    **{key: {"is_decoder": True} for key in _BERTS},
    **dict.fromkeys(_BARTS, _DECODER),
    "codegen": {"rotary_dim": 8, "n_embd": 64, "n_inner": 96},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {**_GEMMA, "activation_sparsity_pattern": 4 * [0.0], "laurel_rank": 8},
    "gemma4_text": {**_GEMMA, "global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global"], 1], [["local"], 2]], "window_size": 12},
    "gptj": {"rotary_dim": 8},
    "llama4_text": {"attention_chunk_size": 16, "intermediate_size_mlp": 96},
}


@dataclass(frozen=True)
class Result:
    """The outcome for one architecture.

    Attributes:
        verdict: "equal", "refused" or "wrong"; "unmade" if transformers made no tiny model.
        why: the reason, or the largest difference of a logit.
    """

    verdict: Literal["equal", "refused", "wrong", "unmade"]
    why: str


def tiny_config(model_type: str, **more: Any) -> Any:
    """A small config of transformers' class for ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    default.allow_global_per_layer_attribute_access = True
    known = {
        key: value
        for key, value in _SIZES.items()
        if hasattr(default, key) and not isinstance(getattr(kind, key, None), property)
    }
    for key in ("sliding_window", "q_lora_rank"):
        if key in known and getattr(default, key) is None:
            del known[key]
    return kind(**{**known, **_MORE.get(model_type, {}), **more})


def make_checkpoint(folder: Path, model_type: str, name: str, **more: Any) -> Any:
    """Write a tiny checkpoint of the class ``name``; its model in float32.

    The numbers are large enough that each token depends on the others before it.
    """
    import transformers

    config = tiny_config(model_type, **more)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).float().eval()
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for param in model.parameters():
            if param is embedding:
                param.copy_(noise(param))
            elif param.dim() > 1:
                param.copy_(1.5 * noise(param) / math.sqrt(param.shape[-1]))
            else:
                param.add_(0.2 * noise(param))
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(0.1 * noise(buffer))
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    """Prompts of several lengths, two of which begin alike; longer than windows and chunks."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCAB, (60,), generator=generator).tolist()
    return [ids[:37], ids[:33] + ids[50:52], ids[40:45], ids[45:46]]


def expected(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Transformers' greedy tokens, and their logits ``[n, vocab]``."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def opened(folder: Path, **settings: Any) -> LLM:
    """The engine with the fallback, in small chunks and blocks."""
    settings = {"max_num_batched_tokens": 16, "block_size": 4, **settings}
    return LLM(
        folder, skip_tokenizer_init=True, max_model_len=MAX_LENGTH, kv_cache_memory="16MiB",
        dtype="float32", model_impl="transformers", **settings,
    )  # fmt: skip


Answers = list[tuple[list[int], Tensor]]


def difference(folder: Path, answers: Answers, **settings: Any) -> float:
    """The largest difference of a log-probability; infinite if a token differs."""
    vocab = answers[0][1].shape[-1]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=vocab)
    asked = prompts()
    worst = 0.0
    with opened(folder, **settings) as llm:
        for _ in range(2):  # The second time from the prefix cache.
            outputs = llm.generate(asked, params)
            for output, (tokens, logits) in zip(outputs, answers, strict=True):
                done = output.outputs[0]
                if done.token_ids != tokens:
                    return math.inf
                rows = logits.log_softmax(-1)
                for entry, row in zip(done.logprobs or (), rows, strict=True):
                    got = torch.tensor([entry[token].logprob for token in range(vocab)])
                    worst = max(worst, float((got - row).abs().max()))
        assert max(output.metrics.num_cached_tokens for output in outputs) > 0
    return worst


def _refused_by_config(model_type: str, name: str) -> Result | None:
    """The refusal of an architecture of which its usual config tells that it cannot be run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from engine_core_transformers.config import FallbackConfigBuilder

    values = {**CONFIG_MAPPING[model_type]().to_dict(), "architectures": [name]}
    try:
        FallbackConfigBuilder.build(HFConfig(**values))
    except UnknownArchitectureError as error:
        return Result("refused", str(error))
    except Exception:  # It is said of the tiny model why there is none.
        return None
    return None


def compare(folder: Path, model_type: str, name: str, **settings: Any) -> Result:
    """Make a tiny checkpoint and compare the fallback with transformers."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            model = make_checkpoint(folder, model_type, name)
        except Exception as error:
            refused = _refused_by_config(model_type, name)
            return refused or Result("unmade", f"{type(error).__name__}: {error}")
        failure, answers = None, None
        try:
            answers = [expected(model, prompt) for prompt in prompts()]
        except Exception as error:  # It may be refused all the same.
            failure = Result("unmade", f"{type(error).__name__}: {error}")
        try:
            if failure is not None or answers is None:
                with opened(folder, **settings):
                    assert failure is not None, "there are answers, or a failure"
                    return failure
            worst = difference(folder, answers, **settings)
        except EngineError as error:
            return Result("refused", str(error))
        except OSError as error:  # Of memory, which was not limited for it.
            return Result("unmade", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Result("wrong", f"{type(error).__name__}: {error}")
    return Result("equal" if worst <= TOLERANCE else "wrong", f"{worst:.1e}")
