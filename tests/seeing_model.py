"""A tiny model that sees, with a tokenizer and a chat template, for tests that go through HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

GOLDEN = Path(__file__).parent / "golden" / "qwen2vl-tiny"
IMAGE_TOKEN, VIDEO_TOKEN = 304, 305
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def character(token: int) -> str:
    """The text of a token."""
    return chr(0x4E00 + token)


def write_seeing_model(folder: Path) -> Path:
    """The golden checkpoint with a tokenizer of a token a character, and of the special ones."""
    folder.mkdir(parents=True)
    config = json.loads((GOLDEN / "config.json").read_text())
    shutil.copy(GOLDEN / "config.json", folder)
    shutil.copy(GOLDEN / "model.safetensors", folder)
    special = {"<|vision_start|>": 301, "<|vision_end|>": 302, "<|image_pad|>": IMAGE_TOKEN}
    special["<|video_pad|>"] = VIDEO_TOKEN
    names = {number: name for name, number in special.items()}
    vocabulary = {names.get(n, character(n)): n for n in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=character(0)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(character(n), normalized=False) for n in range(301)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
