import json
import random
import struct
from pathlib import Path

import gguf
import jinja2
import pytest
from checkpoint_files import GGUFBytes
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from engine_core.checkpoint import GGUFFile
from engine_core.checkpoint.gguf_tokenizer import special_ids, write_tokenizer
from engine_core.errors import TokenizerError

CACHE = Path(__file__).parents[2] / ".cache"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SENTENCES = [
    "Hello world! I'm here, you're THERE, WE'LL see; don't.",
    "  leading   spaces\tand\ttabs  \n\n\n lines\r\nof text   ",
    "123456 7 89,000.50 ½ ² Ⅷ ٣٤ 1st 2nd",
    "日本語テキスト と 漢字 한국어 Привет мир مرحبا हिन्दी ไทย",
    "naïve café ﬁ Å e\u0301 \u00a0nbsp\u2009thin \x00\x7f",
    "emoji 😀👩\u200d👩\u200d👧 flags 🇫🇷",
    "def f(x):\n    return x**2  # $%^&*()_+|~`{}[]:;'\"<>?,./-=\\",
    "foo_bar.baz(qux)->x;//c CamelCase HTTPServer",
    "<|endoftext|> <|im_start|>user\nhi<|im_end|><s></s>",
    "",
]


def texts(count=150):
    rng = random.Random(0)
    pool = "".join(SENTENCES) + " abc XYZ 012 \n\t''"
    made = ["".join(rng.choices(pool, k=rng.randint(1, 120))) for _ in range(count)]
    return SENTENCES + made


def convert(tmp_path, fill, architecture="llama"):
    """The tokenizer and the config that come of what ``fill`` writes into a GGUF file."""
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(GGUFFile(path), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json")), config


def fill_from(tokenizer: Tokenizer, pre: str, **ids):
    """Writes a byte-level BPE tokenizer as llama.cpp's converter does."""
    state = json.loads(tokenizer.to_str())
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    types = dict.fromkeys(tokens, NORMAL)
    for added in state["added_tokens"]:
        looks = added["content"].startswith("<|") and added["content"].endswith("|>")
        types[added["id"]] = CONTROL if added["special"] or looks else USER_DEFINED
    merges = state["model"]["merges"]

    def fill(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        # Ids that the tokenizer leaves out are filled up.
        count = max(tokens) + 1
        writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(count)])
        writer.add_token_types([types.get(i, NORMAL) for i in range(count)])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        for key, value in ids.items():
            getattr(writer, f"add_{key}")(value)

    return fill


def assert_same(ours: Tokenizer, theirs: Tokenizer):
    for text in texts():
        for special in (True, False):
            wanted = theirs.encode(text, add_special_tokens=special)
            found = ours.encode(text, add_special_tokens=special)
            assert found.ids == wanted.ids, text
            assert found.tokens == wanted.tokens, text
        for skip in (True, False):
            assert ours.decode(wanted.ids, skip_special_tokens=skip) == theirs.decode(
                wanted.ids, skip_special_tokens=skip
            )


def fetched(*parts) -> Path:
    path = CACHE.joinpath(*parts)
    if not path.is_file():
        pytest.fail(f"{path} is not there; run 'make models'")
    return path


@pytest.mark.parametrize(
    ("name", "pre", "ids"),
    [
        ("qwen2_5", "qwen2", {"eos_token_id": 151645}),
        ("llama3_1", "llama-bpe", {"bos_token_id": 128000, "eos_token_id": 128009}),
    ],
)
def test_published_tokenizers_come_back_as_they_were(tmp_path, name, pre, ids):
    published = Tokenizer.from_file(str(fetched("tokenizers", name, "tokenizer.json")))
    ours, config = convert(tmp_path, fill_from(published, pre, **ids))
    assert_same(ours, published)
    assert config["eos_token"] == published.id_to_token(ids["eos_token_id"])
    assert config["add_bos_token"] == ("bos_token_id" in ids)
    if name == "qwen2_5":
        assert_text_that_only_looks_special_stays(ours, published)


def assert_text_that_only_looks_special_stays(ours: Tokenizer, published: Tokenizer) -> None:
    text = "<|repo_name|>a<|file_sep|>b<|fim_prefix|>c<|fim_suffix|>d<|fim_middle|>e<|fim_pad|>"
    ids = ours.encode(f"{text}<|im_end|>").ids
    assert ids == published.encode(f"{text}<|im_end|>").ids
    assert ours.decode(ids) == published.decode(ids) == text


def test_smollm2_splits_digits_and_knows_its_template(tmp_path, smollm2_gguf):
    file = GGUFFile(smollm2_gguf)
    write_tokenizer(file, tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # The published tokenizer, put together from its published description.
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    theirs = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:17]])
    assert_same(ours, theirs)
    assert ours.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert config["bos_token"] == "<|im_start|>"
    assert not config["add_bos_token"]
    rendered = jinja2.Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ours.encode(rendered).ids.count(1) == 3


def trained(pre_tokenizer, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(400), trainer)
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer"),
    [
        ("gpt-2", BYTES),
        ("phi-2", BYTES),
        (
            "starcoder",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
        ),
        (
            "refact",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_that_the_library_has_itself(tmp_path, pre, pre_tokenizer):
    tokenizer = trained(pre_tokenizer)
    ours, _ = convert(tmp_path, fill_from(tokenizer, pre, eos_token_id=0))
    assert_same(ours, tokenizer)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("tekken", "HTTPServer 123 a/\n", ["HTTPServer", " ", "1", "2", "3", " a", "/\n"]),
        ("deepseek-v3", "12345 漢字x.foo y", ["123", "45", " ", "漢字", "x", ".foo", " y"]),
        ("default", "a+b=12345 x", ["a", "+", "b", "=", "123", "45", " x"]),
    ],
)
def test_kinds_by_their_pieces(tmp_path, pre, text, pieces):
    ours, _ = convert(tmp_path, fill_from(trained(BYTES), pre, eos_token_id=0, bos_token_id=0))
    cut = [text[slice(*span)] for _, span in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_a_file_without_a_kind_is_default_and_warned_of(tmp_path, caplog):
    def fill(writer):
        fill_from(trained(BYTES), "gpt-2")(writer)
        del writer.kv_data[0]["tokenizer.ggml.pre"]

    ours, _ = convert(tmp_path, fill)
    assert [token for token, _ in ours.pre_tokenizer.pre_tokenize_str("1234")] == ["123", "4"]
    (record,) = caplog.records
    assert "tokenizer.ggml.pre" in record.getMessage()


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize(("pre", "by_default"), [("gpt-2", False), ("llama-bpe", True)])
def test_what_is_added_around_a_text(tmp_path, add_bos, add_eos, pre, by_default):
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    given = {key: value for key, value in flags.items() if value is not None}
    fill = fill_from(trained(BYTES), pre, bos_token_id=1, eos_token_id=2, **given)
    ours, config = convert(tmp_path, fill)
    bos = by_default if add_bos is None else add_bos
    plain = ours.encode("hi there", add_special_tokens=False).ids
    assert ours.encode("hi there").ids == [1] * bos + plain + [2] * bool(add_eos)
    pair = [1] * bos + plain + [2] * bool(add_eos)
    assert ours.encode("hi there", "hi there").ids == pair * 2
    assert config["add_bos_token"] == bos
    assert config["add_eos_token"] == bool(add_eos)


def test_added_tokens_by_their_type(tmp_path):
    tokenizer = trained(BYTES)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    ours, _ = convert(tmp_path, fill_from(tokenizer, "gpt-2"))
    ids = ours.encode("a<think>b<|im_end|>").ids
    think, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<|im_end|>")
    assert (ids[1], ids[3]) == (think, end)
    assert ours.decode(ids) == "a<think>b"
    assert ours.decode(ids, skip_special_tokens=False) == "a<think>b<|im_end|>"


def llama2_pieces():
    """Texts and scores of Llama 2's SentencePiece model, from the file that llama2.c made of it."""
    data = fetched("models", "stories15M.data").read_bytes()[60816028:]
    pieces, at = [], 4
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    assert len(pieces) == 32000
    return pieces


def fill_llama2(writer):
    pieces = llama2_pieces()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    names += [text.replace(" ", "▁") for text, _ in pieces[259:]]
    types += [NORMAL] * (32000 - 259)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def sentencepiece(text, pieces, ids):
    """SentencePiece's BPE as llama2.c has it: join the neighbours whose union scores highest."""
    tokens = []
    for char in text:
        tokens += [ids[char]] if char in ids else [byte + 3 for byte in char.encode()]
    texts = {index: piece for piece, index in ids.items()}
    while True:
        best = (-float("inf"), 0, 0)
        for at in range(len(tokens) - 1):
            union = ids.get(texts.get(tokens[at], "\0") + texts.get(tokens[at + 1], "\0"))
            if union is not None and pieces[union][1] > best[0]:
                best = (pieces[union][1], at, union)
        if best[0] == -float("inf"):
            return tokens
        tokens[best[1] : best[1] + 2] = [best[2]]


@pytest.mark.parametrize("prefix", [True, False])
def test_llama2_by_the_scores_of_its_pieces(tmp_path, prefix):
    def fill(writer):
        fill_llama2(writer)
        writer.add_add_space_prefix(prefix)

    ours, config = convert(tmp_path, fill)
    pieces = llama2_pieces()
    ids = {text: index for index, (text, _) in enumerate(pieces) if index >= 259}
    for text in texts(60):
        if "<s>" in text or not text:
            continue
        wanted = sentencepiece(" " * prefix + text, pieces, ids)
        assert ours.encode(text).ids == [1, *wanted], text
        assert ours.decode(wanted) == text
    assert ours.encode("a</s>").ids[-1] == 2
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == (
        "<s>",
        "</s>",
        "<unk>",
    )


@pytest.mark.parametrize("space", ["▁", " "])
def test_pieces_that_are_taken_whole(tmp_path, space):
    """Gemma's runs of spaces and line ends, as older and newer conversions write them."""
    runs = [space * 2, space * 3, "\n\n", "<b>"]
    pieces = ["<bos>", *runs, *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁", "a", "b"]
    types = [CONTROL, *[USER_DEFINED] * 4, *[BYTE] * 256, *[NORMAL] * 4]

    def fill(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(index) for index in range(len(pieces))])
        writer.add_token_types(types)
        writer.add_bos_token_id(0)
        writer.add_add_space_prefix(False)

    ours, _ = convert(tmp_path, fill, "gemma2")
    for text, wanted in {
        " a": ["▁a"],
        "  a": [runs[0], "a"],
        "   a b": [runs[1], "a", "▁", "b"],
        "a     a": ["a", runs[1], runs[0], "a"],
        "\n\n<b>\n": ["\n\n", "<b>", "<0x0A>"],
    }.items():
        assert ours.encode(text).ids == [0, *(pieces.index(piece) for piece in wanted)], text
        assert ours.decode(ours.encode(text).ids) == text


def test_several_ends_of_a_sequence(tmp_path):
    path = tmp_path / "x.gguf"
    tokens = struct.pack("<IQ", 8, 5) + b"".join(GGUFBytes.string(f"t{i}") for i in range(5))
    file = GGUFBytes().pair("tokenizer.ggml.tokens", 9, tokens)
    for key, value in (("eos", 3), ("eot", 4), ("eom", 3), ("bos", 1)):
        file.pair(f"tokenizer.ggml.{key}_token_id", 4, value)
    path.write_bytes(file.bytes())
    assert special_ids(GGUFFile(path)) == {"bos_token_id": 1, "eos_token_id": [3, 4]}
    path.write_bytes(file.pair("tokenizer.ggml.padding_token_id", 4, 5).bytes())
    with pytest.raises(TokenizerError, match="padding_token_id is 5, but there are 5 tokens"):
        special_ids(GGUFFile(path))


def test_named_chat_templates(tmp_path):
    def fill(writer):
        fill_from(trained(BYTES), "gpt-2")(writer)
        writer.add_chat_template(
            [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        )

    _, config = convert(tmp_path, fill)
    assert config["chat_template"] == [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
    ]


def test_a_file_without_a_tokenizer(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(GGUFBytes().pair("general.architecture", 8, "llama").bytes())
    write_tokenizer(GGUFFile(path), tmp_path)
    assert special_ids(GGUFFile(path)) == {}
    assert not (tmp_path / "tokenizer.json").exists()


def replaced(key, value):
    def change(data):
        data[f"tokenizer.ggml.{key}"] = gguf.GGUFValue(value, *types_of(value))

    return change


def types_of(value):
    kinds = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        bool: gguf.GGUFValueType.BOOL,
    }
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, kinds[type(value[0])]
    return (kinds[type(value)],)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("model", "bert"), "kind 'bert'; gpt2 .*--tokenizer"),
        (replaced("pre", "my-own"), "rules 'my-own' .*known are .*smollm"),
        (replaced("pre", 3), "rules 3 "),
        (replaced("tokens", "x"), r"tokenizer\.ggml\.tokens must be an array of strings"),
        (replaced("tokens", ["a", "b", "a"]), "the token 'a' has two ids"),
        (replaced("token_type", [1, 2]), "token_type must be an array of 6"),
        (replaced("merges", ["nospace"]), "the merge 'nospace' has no second piece"),
        (replaced("merges", ["q never-a-token"]), "tables are damaged"),
        (replaced("add_bos_token", 1), "add_bos_token must be true or false, got 1"),
        (replaced("add_bos_token", True), "wants bos_token added .*does not give"),
        (replaced("eos_token_id", 10**6), "eos_token_id is 1000000, but there are 6"),
        (replaced("model", "llama"), "scores must be an array of 6"),
    ],
)
def test_broken_tokenizers(tmp_path, change, message):
    tokenizer = trained(BYTES)

    def fill(writer):
        fill_from(tokenizer, "gpt-2")(writer)
        change(writer.kv_data[0])

    with pytest.raises(TokenizerError, match=rf"tokenizer\.gguf.*{message}"):
        convert(tmp_path, fill)


@pytest.mark.parametrize("key", ["remove_extra_whitespaces", "precompiled_charsmap"])
def test_normalisation_that_is_not_known(tmp_path, key):
    def fill(writer):
        fill_llama2(writer)
        replaced(key, True)(writer.kv_data[0])

    with pytest.raises(TokenizerError, match=key):
        convert(tmp_path, fill)


def test_composed_characters_of_qwen2(tmp_path):
    tokenizer = trained(BYTES, normalizers.NFC())
    ours, _ = convert(tmp_path, fill_from(tokenizer, "qwen2"))
    assert ours.encode("e\u0301").ids == ours.encode("é").ids
