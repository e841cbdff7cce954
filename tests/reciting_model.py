"""A model that says one text, whatever it is asked: what its readers make of it is to be tested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

_SIZE = 64


def write_reciting_model(
    folder: Path, pieces: Sequence[str], replies: Mapping[str, Sequence[str]] | None = None
) -> Path:
    """A checkpoint whose every answer is ``pieces``, a token each; they must differ.

    After a tool's result that ``replies`` has, the answer is the pieces that stand there.

    A token's embedding is a number of its own, nothing is added to it, and the output layer turns
    it into the token that comes next.
    """
    replies = replies or {}
    chains = [[result, *reply] for result, reply in replies.items()]
    tokens = ["<unk>", "</s>", "<start>", *pieces, *(token for chain in chains for token in chain)]
    assert len(set(tokens)) == len(tokens) <= _SIZE, "each piece is a token of its own"
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _SIZE,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": _SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    following = torch.zeros(_SIZE, _SIZE)
    for chain in (["<start>", *pieces], *chains):
        for token, after in pairwise([*map(tokens.index, chain), 1]):
            following[after, token] = 1.0
    attention = {f"self_attn.{name}_proj": (_SIZE, _SIZE) for name in "qkvo"}
    mlp = {"mlp.gate_proj": (8, _SIZE), "mlp.up_proj": (8, _SIZE), "mlp.down_proj": (_SIZE, 8)}
    nothing = {
        f"model.layers.0.{name}.weight": torch.zeros(shape)
        for name, shape in (attention | mlp).items()
    }
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors = nothing | {f"model.{name}.weight": torch.ones(_SIZE) for name in norms}
    tensors |= {"model.embed_tokens.weight": torch.eye(_SIZE), "lm_head.weight": following}
    save_file(tensors, folder / "model.safetensors")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in tokens[3:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template += "{% if messages[-1].role != 'tool' %}<start>{% endif %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    return folder
