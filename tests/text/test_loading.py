import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine_core.errors import RequestError, TokenizerError
from engine_core.text import FastTokenizer, Tokenizer, TransformersTokenizer, load_tokenizer


def check_same(tokenizer: Tokenizer, reference: Any, texts: list[str]) -> None:
    """Encoding, decoding and the special tokens are those of transformers."""
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.special_tokens == reference.special_tokens_map
    for text in texts:
        for add in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == reference.encode(text, add_special_tokens=add)
        for skip in (True, False):
            decoded = tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == reference.decode(ids, skip_special_tokens=skip)


def copy_config(source: Path, target: Path, **changes: Any) -> Path:
    """``source`` with other settings; None takes a setting away."""
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del config[key]
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_real_tokenizers_equal_transformers(
    real_folder: Callable[[str], Path],
    real_tokenizers: dict[str, Tokenizer],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    name: str,
) -> None:
    assert isinstance(real_tokenizers[name], FastTokenizer)
    check_same(real_tokenizers[name], hf_tokenizer(real_folder(name)), texts)


def test_tokenizer_with_code_of_its_own_is_read_without_running_it(
    real_folder: Callable[[str], Path],
    real_tokenizers: dict[str, Tokenizer],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
) -> None:
    tokenizer = real_tokenizers["chatglm3"]
    reference = hf_tokenizer(real_folder("chatglm3"), generic=True)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_added_tokens_have_the_ids_stated(real_tokenizers: dict[str, Tokenizer]) -> None:
    # The model's embedding has these rows; transformers would number them from 64789 on.
    tokenizer = real_tokenizers["chatglm3"]
    assert tokenizer.encode("[gMASK]", add_special_tokens=False) == [64790]
    assert tokenizer.encode("<|user|>", add_special_tokens=False)[-1] == 64795
    assert tokenizer.vocab_size == 64797
    assert tokenizer.id_to_token(64789) is None
    assert tokenizer.decode([64789, 64791], skip_special_tokens=False) == ""


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
def test_small_tokenizers_equal_transformers(
    small_folders: dict[str, Path],
    small_tokenizers: dict[str, Tokenizer],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    name: str,
) -> None:
    long = "\n".join(texts) * 20
    assert len(long) > 8192, "long enough to leave the interpreter to others meanwhile"
    check_same(small_tokenizers[name], hf_tokenizer(small_folders[name]), [*texts, long])


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {"bos_token": "<|new|>", "pad_token": "the"},
        {"added_tokens_decoder": {"7": {"content": "<|extra|>", "special": True}}},
        {"additional_special_tokens": ["<tool>", "<|extra|>"]},
        {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
        {  # a plain token that a name makes special
            "eos_token": "<tool>",
            "added_tokens_decoder": {"390": {"content": "<tool>", "normalized": True}},
        },
        {
            "eos_token": "<|later|>",
            "added_tokens_decoder": {"392": {"content": "<|later|>", "special": False}},
        },
        {
            "eos_token": {"__type": "AddedToken", "content": "<|eot|>", "rstrip": True},
            "added_tokens_decoder": {
                "392": {"content": "<|later|>", "special": True},
                "393": {"content": "plain", "special": False, "lstrip": True},
            },
        },
    ],
    ids=lambda changes: "-".join(changes),
)
def test_settings_have_the_effect_that_they_have_in_transformers(
    small_folders: dict[str, Path],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    folder = copy_config(small_folders["byte-level"], tmp_path, **changes)
    more = [*texts, "<|new|>the<image> <audio>", "a <|later|> plain  <|eot|>  b<|extra|>"]
    tokenizer = load_tokenizer(folder)
    check_same(tokenizer, hf_tokenizer(folder), more)
    assert isinstance(tokenizer, FastTokenizer)


def test_truncation_and_padding_are_not_applied(
    small_folders: dict[str, Path], hf_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    folder = copy_config(small_folders["byte-level"], tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer, reference = load_tokenizer(folder), hf_tokenizer(folder)
    for text in ("hello world and more of it", "x"):
        assert tokenizer.encode(text) == reference.encode(text)


def test_older_files_of_special_and_added_tokens(
    small_folders: dict[str, Path],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    tmp_path: Path,
) -> None:
    folder = copy_config(small_folders["byte-level"], tmp_path, bos_token=None, eos_token=None)
    named = {
        "bos_token": {"content": "<|begin|>", "lstrip": False, "normalized": False},
        "eos_token": "</s>",
        "additional_special_tokens": ["<|end|>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(named), encoding="utf-8")
    size = load_tokenizer(small_folders["byte-level"]).vocab_size
    added = {"<|begin|>": size, "ordinary": size + 1}
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    more = [*texts, "<|begin|> ordinary text"]
    check_same(load_tokenizer(folder), hf_tokenizer(folder), more)


def test_class_that_builds_another_tokenizer_is_left_to_transformers(
    small_folders: dict[str, Path],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    tmp_path: Path,
) -> None:
    # Transformers 5 replaces the normalizer that puts "▁" before every word after a special token.
    folder = copy_config(small_folders["byte-fallback"], tmp_path, tokenizer_class="LlamaTokenizer")
    tokenizer = load_tokenizer(folder)
    check_same(tokenizer, hf_tokenizer(folder), texts)
    as_it_is = load_tokenizer(small_folders["byte-fallback"])
    text = "the</s>the"
    assert tokenizer.encode(text) != as_it_is.encode(text)


def test_built_in_class_with_another_expression_is_left_to_transformers(
    real_folder: Callable[[str], Path], hf_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    source = real_folder("qwen2_5")
    folder = copy_config(source, tmp_path)
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\p{L}+|\p{N}{1,3}"}
    file.write_text(json.dumps(settings), encoding="utf-8")
    text = "in 1234567 steps"
    assert load_tokenizer(folder).encode(text) == hf_tokenizer(folder).encode(text)


def test_fast_path_does_not_import_transformers(real_folder: Callable[[str], Path]) -> None:
    folders = [str(real_folder(name)) for name in ("qwen2_5", "llama3_1")]
    script = (
        "import sys; from pathlib import Path; from engine_core.text import load_tokenizer\n"
        f"for folder in {folders!r}: load_tokenizer(Path(folder))\n"
        "print(*sys.modules.keys() & {'torch', 'transformers'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_vocabulary_and_merges_without_tokenizer_json(
    byte_level: Tokenizer,
    small_folders: dict[str, Path],
    hf_tokenizer: Callable[..., Any],
    texts: list[str],
    tmp_path: Path,
) -> None:
    Backend.from_file(str(small_folders["byte-level"] / "tokenizer.json")).model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    check_same(load_tokenizer(tmp_path), hf_tokenizer(tmp_path), texts)


def test_wordpiece_that_cleans_up_spaces(hf_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "hello", "world", "##s", ",", "."]
    backend = Backend(models.WordPiece({token: index for index, token in enumerate(vocabulary)}))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "clean_up_tokenization_spaces": True}
    config |= {"truncation_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TransformersTokenizer)
    assert tokenizer.truncation_side == "left"
    texts = ["Hello, worlds.", "world", "", "what?"]
    check_same(tokenizer, hf_tokenizer(tmp_path), texts)
    assert tokenizer.decode(tokenizer.encode("Hello, worlds.")) == "hello, worlds."
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.id_to_token(5) == "hello"
    assert tokenizer.id_to_token(10) is tokenizer.id_to_token(-1) is None
    assert tokenizer.token_to_id("hello") == 5
    assert tokenizer.token_to_id("other") is None
    assert tokenizer.decode([5, 99]) == "hello"


def test_special_ids_are_those_that_decoding_leaves_out(byte_level: Tokenizer) -> None:
    left_out = {
        token_id
        for token_id in range(byte_level.vocab_size)
        if byte_level.decode([token_id]) != byte_level.decode([token_id], skip_special_tokens=False)
    }
    assert byte_level.special_ids == left_out != set()


def test_ids_outside_the_vocabulary_give_nothing(byte_level: Tokenizer) -> None:
    size = byte_level.vocab_size
    assert byte_level.decode([size, size + 100]) == ""
    assert byte_level.id_to_token(size) is None
    assert byte_level.id_to_token(-1) is None
    assert byte_level.token_to_id("no such token") is None


def test_text_that_utf8_cannot_express_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800\) at character 3"):
        byte_level.encode("abc\ud800")
    with pytest.raises(RequestError, match="must be a string, got int"):
        byte_level.encode(7)  # type: ignore[arg-type]


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*\.model.*skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="is not a folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b'{"model": ', "cannot be read"),
        ("tokenizer.json", b"\xff\xfe\x00", "cannot be read"),
        ("tokenizer.json", b"{}", "cannot be read"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"\xff\xfe\x00", "cannot be read"),
        ("tokenizer_config.json", b"[]", "holds a JSON list, not an object"),
        ("tokenizer_config.json", b'{"bos_token": 5}', "bos_token is not a token: 5"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is neither"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', "lack name or template"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "is not an object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": "y"}}', "the id 'x'"),
        (
            "tokenizer_config.json",
            b'{"tokenizer_class": "TokenizersBackend",'
            b' "added_tokens_decoder": {"2000000000": {"content": "<far>"}}}',
            "'<far>' the id 2000000000, but the first id free",
        ),
        ("tokenizer_config.json", b'{"extra_special_tokens": 1}', "not a list"),
        ("special_tokens_map.json", b'{"bos_token": {}}', "bos_token is not a token"),
        ("added_tokens.json", b'{"a": "b"}', "the id 'b'"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
    ],
)
def test_broken_file_is_named(
    small_folders: dict[str, Path], tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    folder = copy_config(small_folders["byte-level"], tmp_path)
    (folder / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{file}.*{message}"):
        load_tokenizer(folder)


def test_what_transformers_cannot_read_either(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no such model")
    with pytest.raises(TokenizerError, match="transformers cannot read the tokenizer in"):
        load_tokenizer(tmp_path)
