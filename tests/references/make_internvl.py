"""Writes the golden fixtures of InternLM2, and of InternVL around it, by the models' original code.

    git clone https://github.com/OpenGVLab/InternVL
    pip install torch transformers==4.45.2 einops safetensors
    python tests/references/make_internvl.py InternVL/internvl_chat

The code is that of ``internvl/model`` there, at commit 2410d1db of 22 September 2025; later
versions of transformers no longer run it. Weights and prompts are drawn at random, the outputs are
the code's own, in float32 on a CPU. Nothing of engine-core is used.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

GOLDEN = Path(__file__).parents[1] / "golden"
NEW_TOKENS = 16
COMMIT = "2410d1dbf208f0e799459aff9376e5747dbf41a2"
CONTEXT, START, END = 190, 191, 192

TEXT = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
DYNAMIC = {
    **TEXT,
    "num_attention_heads": 4,
    "bias": True,
    "rope_theta": 10000,
    "max_position_embeddings": 32,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
# As InternViT-6B: norms by the root mean square, of q and k too, and no bias on q, k and v. Tiles
# are larger than the pictures that the table of positions was made for.
CHAT = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "force_image_size": 56,
    "ps_version": "v1",
    "select_layer": -2,
    "template": "internlm2-chat",
    "torch_dtype": "float32",
    "llm_config": TEXT,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 42,
        "patch_size": 14,
        "norm_type": "rms_norm",
        "qk_normalization": True,
        "qkv_bias": False,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
    },
}


def randomise(model: nn.Module) -> None:
    """Weights with which every part of a model shows in the logits."""
    for name, param in model.named_parameters():
        param.requires_grad_(False)
        if param.dim() > 1:
            param.normal_(0.0, 1.5 * param.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            param.normal_(0.0, 0.3)
        else:
            param.normal_(1.0, 0.3)


@torch.inference_mode()
def greedy(model: Any, embeds: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Logits of the prompt and of each new token, with the code's own cache, and the tokens."""
    positions = torch.arange(embeds.shape[1])[None]
    out = model(inputs_embeds=embeds, position_ids=positions, use_cache=True)
    prompt = out.logits[0].float()
    rows, tokens = [prompt[-1]], [int(prompt[-1].argmax())]
    while len(tokens) < NEW_TOKENS:
        position = torch.tensor([[embeds.shape[1] + len(tokens) - 1]])
        out = model(
            input_ids=torch.tensor([tokens[-1:]]),
            position_ids=position,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        rows.append(out.logits[0, -1].float())
        tokens.append(int(rows[-1].argmax()))
    return prompt, torch.stack(rows), tokens


def write(
    name: str,
    config: Mapping[str, Any],
    model: Any,
    prompts: Sequence[tuple[str, list[int], list[Tensor]]],
) -> None:
    """A fixture; the pictures of a prompt are the tiles ``[tiles, 3, S, S]`` of each."""
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    text = getattr(model, "language_model", model)
    entries, tensors = [], {}
    for index, (title, ids, pictures) in enumerate(prompts):
        # Dynamic NTK remembers the longest sequence that it saw: begin anew.
        for layer in text.model.layers:
            layer.attention._init_rope()
        embeds = text.get_input_embeddings()(torch.tensor([ids])).clone()
        made = {}
        if pictures:
            made["pixel_values"] = torch.cat(pictures)
            with torch.inference_mode():
                made["image_features"] = model.extract_feature(made["pixel_values"])
            places = torch.tensor(ids) == CONTEXT
            embeds[0, places] = made["image_features"].flatten(0, 1)
        logits, steps, tokens = greedy(text, embeds)
        made |= {"prefill_logits": logits, "step_logits": steps}
        tensors |= {f"p{index}.{key}": tensor.contiguous() for key, tensor in made.items()}
        top = steps.topk(2).values
        entries.append(
            {"name": title, "input_ids": ids, "new_tokens": tokens}
            | {"tiles": [len(each) for each in pictures]}
            | {key: f"p{index}.{key}" for key in made}
            | {"min_margin": round(float((top[:, 0] - top[:, 1]).min()), 6)}
        )
        print(name, title, entries[-1]["min_margin"], f"{steps.std():.2f}")
    expected = {
        "fixture": name,
        "made_by": "tests/references/make_internvl.py",
        "reference": {
            "code": "OpenGVLab/InternVL internvl_chat/internvl/model",
            "revision": COMMIT,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "prompts": entries,
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "expected.safetensors")
    state = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def draw(length: int) -> list[int]:
    return torch.randint(3, CONTEXT, (length,)).tolist()


def text_prompts(*lengths: int) -> list[tuple[str, list[int], list[Tensor]]]:
    return [(f"{length} tokens", draw(length), []) for length in lengths]


def picture_prompts() -> list[tuple[str, list[int], list[Tensor]]]:
    def picture(tiles: int) -> tuple[list[int], Tensor]:
        return [START, *[CONTEXT] * (4 * tiles), END], torch.randn(tiles, 3, 56, 56)

    (a, one), (b, three), (c, two), (d, other) = (picture(tiles) for tiles in (1, 3, 2, 1))
    return [
        ("text", draw(15), []),
        ("image-first", [*a, *draw(10)], [one]),
        ("image-tiles", [*draw(5), *b, *draw(8)], [three]),
        ("two-images", [*draw(3), *c, *draw(4), *d, *draw(4)], [two, other]),
    ]


def main(source: Path) -> None:
    # Neither is run: no path is dropped at inference, and no adapter is trained.
    for module, names in (("timm.models.layers", ["DropPath"]), ("peft", ["LoraConfig"])):
        stand_in: Any = types.ModuleType(module)
        for name in [*names, "get_peft_model"]:
            setattr(stand_in, name, None)
        sys.modules[module] = stand_in
    sys.path.insert(0, str(source))
    from internvl.model.internlm2.configuration_internlm2 import InternLM2Config
    from internvl.model.internlm2.modeling_internlm2 import InternLM2ForCausalLM
    from internvl.model.internvl_chat.configuration_internvl_chat import InternVLChatConfig
    from internvl.model.internvl_chat.modeling_internvl_chat import InternVLChatModel

    for name, values, lengths in (
        ("internlm2-gqa", TEXT, (1, 9, 40)),
        # Within the trained length, beyond it while decoding, and beyond it from the start.
        ("internlm2-dynamic", DYNAMIC, (9, 25, 45)),
    ):
        torch.manual_seed(0)
        model = InternLM2ForCausalLM(InternLM2Config(**values)).float().eval()
        randomise(model)
        write(name, values, model, text_prompts(*lengths))
    torch.manual_seed(1)
    model = InternVLChatModel(InternVLChatConfig(**CHAT), use_flash_attn=False).float().eval()
    randomise(model)
    write("internvl-chat-internlm2", CHAT, model, picture_prompts())
    tokens = {"<IMG_CONTEXT>": CONTEXT, "<img>": START, "</img>": END}
    folder = GOLDEN / "internvl-chat-internlm2"
    (folder / "added_tokens.json").write_text(json.dumps(tokens) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
