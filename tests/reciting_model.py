"""Models that say texts written before: what readers and clients make of them is to be tested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models


def write_reciting_model(
    folder: Path, pieces: Sequence[str], replies: Mapping[str, Sequence[str]] | None = None
) -> Path:
    """A checkpoint whose every answer is ``pieces``, a token each; they must differ.

    After a tool's result that ``replies`` has, the answer is the pieces that stand there.
    """
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template += "{% if messages[-1].role != 'tool' %}<start>{% endif %}"
    template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    return write_scripted_model(folder, {"<start>": pieces, **(replies or {})}, template)


def write_scripted_model(
    folder: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str,
    *,
    max_length: int = 256,
    letters: str = "",
) -> Path:
    """A checkpoint that says one of several texts, whichever its chat template chooses.

    A token's embedding is a number of its own, nothing is added to it, and the output layer turns
    it into the token that comes next.

    Args:
        folder: where it is written.
        scripts: the pieces of each text, a token each, by the token that the prompt ends with. No
            piece may be in two places.
        template: the chat template.
        max_length: tokens of prompt and text.
        letters: further tokens, a character each, which only a grammar can make it say.
    """
    pieces = list(chain.from_iterable(scripts.values()))
    tokens = ["<unk>", "</s>", *scripts, *pieces, *letters]
    assert len(set(tokens)) == len(tokens), "each piece is a token of its own"
    size = -(-len(tokens) // 64) * 64
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": size,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    following = torch.zeros(size, size)
    for start, script in scripts.items():
        for token, after in pairwise([start, *script, "</s>"]):
            # Far above the others, so that it comes at any temperature.
            following[tokens.index(after), tokens.index(token)] = 8.0
    attention = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    mlp = {"mlp.gate_proj": (8, size), "mlp.up_proj": (8, size), "mlp.down_proj": (size, 8)}
    nothing = {
        f"model.layers.0.{name}.weight": torch.zeros(shape)
        for name, shape in (attention | mlp).items()
    }
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors = nothing | {f"model.{name}.weight": torch.ones(size) for name in norms}
    tensors |= {"model.embed_tokens.weight": torch.eye(size), "lm_head.weight": following}
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(tokens[: 2 + len(scripts)])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    return folder
