"""Config builders of DeepSeek-V2 and V3 checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_core.configs import RotaryConfigBuilder, check_kinds
from engine_core.errors import ConfigError

_ATTENTION = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_COMMON = {
    **_ATTENTION,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


class DeepseekV2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of DeepSeek-V2, V2-Lite and V2.5.

    The built config has ``n_group`` and ``topk_group`` of 1 where experts have no groups.

    Attributes:
        fixed: keys that a checkpoint may have, and the only value that the model does.
        topk_methods: ways to choose experts, and whether they choose groups first.
    """

    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    nullable: ClassVar[Mapping[str, tuple[Any, Any]]] = {
        "q_lora_rank": (1, 1536),
        "n_group": (1, None),
        "topk_group": (1, None),
        "num_experts_per_tok": (1, None),
    }
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    rope_types: ClassVar[tuple[str, ...]] = ("default", "yarn")
    first_dense: ClassVar[int] = 0
    fixed: ClassVar[Mapping[str, Any]] = {
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "rope_interleave": True,
        "scoring_func": "softmax",
    }
    topk_methods: ClassVar[Mapping[str, bool]] = {"greedy": False, "group_limited_greedy": True}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Say the sizes of heads and of groups; refuse what the model does not do."""
        super().complete(values)
        check_kinds(values, {"num_attention_heads": 1, "num_experts_per_tok": 1})
        for key, value in cls.fixed.items():
            if values.get(key, value) != value:
                raise ConfigError(
                    f"config.json: {key} is {values[key]!r}; {cls.architecture} knows only {value}"
                )
        heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads")
        if kv_heads != heads:
            raise ConfigError(
                f"config.json: num_key_value_heads is {kv_heads!r} and num_attention_heads "
                f"{heads}; every head has keys of its own, so they must be equal"
            )
        first = values.setdefault("first_k_dense_replace", cls.first_dense)
        if type(first) is not int or first < 0:
            raise ConfigError(
                f"config.json: first_k_dense_replace must be an integer from 0 on, got {first!r}"
            )
        method = values["topk_method"]
        if method not in cls.topk_methods:
            raise ConfigError(
                f"config.json: topk_method {method!r} is not one of {', '.join(cls.topk_methods)}"
            )
        groups = {"n_group": 1, "topk_group": 1}
        if cls.topk_methods[method]:
            check_kinds(values, groups)
        else:
            values.update(groups)
        # Transformers calls the rotated part a head.
        values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]


class DeepseekV3ConfigBuilder(DeepseekV2ConfigBuilder):
    """Reads the configs of DeepSeek-V3, V3.1 and R1, and of models under their architecture."""

    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "topk_method": "noaux_tc",
    }
    # Null is no to transformers.
    nullable: ClassVar[Mapping[str, tuple[Any, Any]]] = {
        "q_lora_rank": (1, 1536),
        "norm_topk_prob": (True, True),
        "rope_interleave": (True, True),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    first_dense: ClassVar[int] = 3
    fixed: ClassVar[Mapping[str, Any]] = {
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
    }
    topk_methods: ClassVar[Mapping[str, bool]] = {"noaux_tc": True}
