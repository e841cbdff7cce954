"""A good small checkpoint with a tokenizer and a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from check_models import Model
from golden_fixtures import GOLDEN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a disk cache of its own."""
    home = tmp_path_factory.mktemp("cache-home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "engine-core"


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama-gqa" / file, folder / file)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:3])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def model(good_folder: Path, tmp_path: Path) -> Model:
    return Model(Path(shutil.copytree(good_folder, tmp_path / "model")))
