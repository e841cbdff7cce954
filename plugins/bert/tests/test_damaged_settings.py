"""sentence-transformers' files with a value that is none: an error of ours, or a pooling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples
from tiny_bert import change

from engine_core.configs import HFConfig, PoolingConfig
from engine_core.configs.pooling import read_pooling, read_scoring
from engine_core.errors import EngineError
from engine_core.text import load_tokenizer

POOLED = Path(__file__).parent / "pooled"
KEYS = {
    "sentence_bert_config.json": (
        *("max_seq_length", "do_lower_case", "tokenizer_args", "processor_kwargs", "config_args"),
        *("processing_kwargs", "transformer_task", "modality_config", "module_output_name"),
    ),
    "config_sentence_transformers.json": (
        *("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"),
    ),
    "tokenizer_config.json": ("model_max_length", "model_input_names"),
    "1_Pooling/config.json": ("pooling_mode", "include_prompt", "pooling_mode_cls_token"),
    "2_Dense/config.json": ("in_features", "out_features", "bias", "activation_function"),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=examples(400), deadline=None)
@given(
    place=st.sampled_from([(name, key) for name, keys in KEYS.items() for key in keys]),
    value=VALUES,
    scores=st.booleans(),
)
def test_no_value_is_a_surprise(place: tuple[str, str], value: Any, scores: bool) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "pooled"
        shutil.copytree(POOLED, folder)
        if scores:
            modules = json.loads((folder / "modules.json").read_text())
            (folder / "modules.json").write_text(json.dumps(modules[:1]))
            change(
                folder / "sentence_bert_config.json",
                transformer_task="sequence-classification",
                modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
                module_output_name="scores",
            )
        change(folder / place[0], **{place[1]: value})
        config = HFConfig(json.loads((folder / "config.json").read_text()))
        try:
            if scores:
                made = read_scoring(folder, config, hidden_size=16)
            else:
                made = read_pooling(folder, config, 16) or PoolingConfig(hidden_size=1)
            load_tokenizer(folder)
        except EngineError:
            return
        assert made.task == ("score" if scores else "embed")
        assert made.max_length is None or made.max_length > 0
