"""Vectors and scores of BERT and RoBERTa, against transformers' own classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_bert import change, make, states, write_modules
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForPreTraining,
    RobertaForMaskedLM,
    XLMRobertaForMaskedLM,
)

from engine_core import LLM, EngineConfig, PoolingParams, SamplingParams
from engine_core.check import check_model
from engine_core.errors import ConfigError, OptionError, RequestError, TokenizerError

KINDS = ["bert", "roberta"]
LENGTHS = [1, 7, 7, 30, 2, 38, 12, 7]


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(5, 64, size=size).tolist() for size in LENGTHS]


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(folder, request.param)


def wanted(model: Any, ids: list[int], kind: str) -> np.ndarray:
    hidden = states(model, ids)
    pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
    return pooled.numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


# Six of the prompts' eight lengths do not fit a step of 48 tokens beside their neighbours.
@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 48, "max_num_seqs": 3}])
def test_vectors_are_those_of_transformers(family: Any, more: dict[str, Any]) -> None:
    folder, model = family
    with LLM(folder, **more) as llm:
        outputs = llm.embed(prompts())
        raw = llm.embed(prompts()[3], PoolingParams(normalize=False))
        assert llm.engine.scheduler.num_running == 0
        llm.engine.scheduler.check()
    for ids, output in zip(prompts(), outputs, strict=True):
        assert output.prompt_token_ids == ids
        expected = unit(wanted(model, ids, "mean"))
        np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)
        assert output.outputs.embedding == output.outputs.vector.tolist()
    np.testing.assert_allclose(
        raw[0].outputs.vector, wanted(model, prompts()[3], "mean"), atol=1e-5
    )


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_modules_say_how_vectors_are_made(flag: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model = make(tmp_path)
    write_modules(
        tmp_path,
        flag,
        normalize=False,
        prompts={"query": "the cat ", "document": ""},
        default_prompt_name="document",
        similarity_fn_name="dot",
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    with LLM(tmp_path) as llm:
        assert llm.engine.max_model_len == 12
        (own,) = llm.embed("rain is near")
        (asked,) = llm.embed("rain is near", prompt_name="query")
        (score,) = llm.score("rain", "sun")
        cut = llm.embed("a dog ran far and far and far and far and far", truncate_prompt_tokens=-1)
        five = llm.embed(["a dog ran far", [2, 9, 9, 9, 9, 3]], truncate_prompt_tokens=5)
        with pytest.raises(RequestError, match=r"no prompt 'task'; it has 'query', 'document'"):
            llm.embed("rain", prompt_name="task")
        with pytest.raises(RequestError, match=r"prompt 1: .*13 tokens is longer than .* 12"):
            llm.embed([[9] * 3, [9] * 13])
        with pytest.raises(RequestError, match="leaves no room for the 2 special tokens"):
            llm.embed("rain", truncate_prompt_tokens=1)
    assert own.prompt_token_ids == [2, 15, 16, 17, 3]
    np.testing.assert_allclose(
        own.outputs.vector, wanted(model, own.prompt_token_ids, kind), atol=1e-5
    )
    assert asked.prompt_token_ids == [2, 5, 7, 15, 16, 17, 3]
    one, other = (wanted(model, [2, token, 3], kind) for token in (15, 18))
    assert math.isclose(score.outputs.score, float(one @ other), abs_tol=1e-4)
    assert len(cut[0].prompt_token_ids) == 12
    assert cut[0].prompt_token_ids[-1] == 3
    assert [each.prompt_token_ids for each in five] == [[2, 6, 8, 13, 3], [2, 9, 9, 9, 9]]


@pytest.mark.parametrize(
    ("pooling", "sentence", "message"),
    [
        ({"pooling_mode": ["mean", "min"]}, {}, r"1_Pooling/config.json: pooling by .*'min'"),
        (
            {"pooling_mode": "mean", "include_prompt": False},
            {"prompts": {"query": "rain "}},
            "include_prompt false",
        ),
        ({"pooling_mode": "mean"}, {"similarity_fn_name": "maxsim"}, "'maxsim' is not one"),
        ({"pooling_mode": "mean"}, {"prompts": {"query": 3}}, "prompts must be texts by name"),
        ({"pooling_mode": "mean"}, {"truncate_dim": "8"}, "truncate_dim must be a positive"),
        ({"pooling_mode": "mean"}, {"default_prompt_name": "x"}, "default_prompt_name 'x'"),
    ],
)
def test_what_is_not_supported_is_refused(
    pooling: dict[str, Any], sentence: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    write_modules(tmp_path, pooling, **sentence)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path)


def test_other_modules_and_positions_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Transformer, Pooling, LSTM are not supported"):
        LLM(tmp_path)
    modules[2]["type"] = "mine.Normalize"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=r"'mine.Normalize' is code of the checkpoint's own"):
        LLM(tmp_path)
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Transformer is in the folder '0_Transformer'; move"):
        LLM(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ConfigError, match="position_embedding_type 'relative_key'"):
        LLM(tmp_path, hf_overrides={"position_embedding_type": "relative_key"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask' is not supported"),
        ({"module_output_name": "sentence_embedding"}, "'token_embeddings' is"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}},
            "'logits'} is not supported; .*'last_hidden_state'} is",
        ),
        ({"modality_config": {"image": {}}}, "has no 'text'"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, r"processing_kwargs.text .*leave it"),
        ({"tokenizer_args": {"truncation_side": "left"}}, "model_max_length alone is"),
        ({"config_kwargs": {"hidden_act": "relu"}}, "config_kwargs .*relu.* is not supported"),
        ({"max_seq_length": "long"}, "max_seq_length must be a positive whole number, got 'long'"),
    ],
)
def test_other_settings_of_the_transformer_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    change(tmp_path / "sentence_bert_config.json", **values)
    with pytest.raises(ConfigError, match=f"sentence_bert_config.json: .*{message}"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # Since version 6 the length is only there.
        ("tokenizer_config.json", {"model_max_length": 12}),
        ("sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 12}}),
        ("sentence_roberta_config.json", {"max_seq_length": 12}),
    ],
)
def test_texts_are_as_long_as_the_files_say(
    name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    change(tmp_path / "tokenizer_config.json", model_max_length=10**30)
    change(tmp_path / name, **values)
    with LLM(tmp_path) as llm:
        (cut,) = llm.embed("rain " * 50, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 12
    with LLM(tmp_path, max_model_len=20) as llm:
        assert len(llm.embed("rain " * 18)[0].prompt_token_ids) == 20


def test_vectors_are_as_short_as_the_files_say(tmp_path: Path) -> None:
    model = make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"}, truncate_dim=16)
    with LLM(tmp_path, hf_overrides={"is_matryoshka": True}) as llm:
        own, whole, short = (
            llm.embed([[9, 8, 7]], params)[0].outputs.vector
            for params in (
                None,
                PoolingParams(dimensions=48),
                PoolingParams(normalize=True),
            )
        )
    wanted_whole = unit(wanted(model, [9, 8, 7], "mean"))
    np.testing.assert_allclose(whole, wanted_whole, atol=1e-5)
    # sentence-transformers cuts after the module that normalises.
    np.testing.assert_allclose(own, wanted_whole[:16], atol=1e-5)
    np.testing.assert_allclose(short, unit(wanted_whole[:16]), atol=1e-5)


@pytest.mark.parametrize(
    "model_class", [BertForMaskedLM, BertForPreTraining, RobertaForMaskedLM, XLMRobertaForMaskedLM]
)
def test_a_masked_language_model_is_an_encoder(model_class: type[Any], tmp_path: Path) -> None:
    make(tmp_path, "bert" if model_class.__name__.startswith("Bert") else "roberta")
    sizes = json.loads((tmp_path / "config.json").read_text())
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).eval()
    model.save_pretrained(tmp_path)
    with LLM(tmp_path) as llm:
        (output,) = llm.embed([[2, 9, 30, 3]])
    expected = unit(wanted(model.base_model, [2, 9, 30, 3], "mean"))
    np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "p"), [("euclidean", 2.0), ("manhattan", 1.0)])
def test_distances_are_scores(name: str, p: float, tmp_path: Path) -> None:
    model = make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"}, normalize=False, similarity_fn_name=name)
    with LLM(tmp_path) as llm:
        scores = [each.outputs.score for each in llm.score("rain", ["sun", "rain"])]
    one, other = (torch.tensor(wanted(model, [2, token, 3], "mean")) for token in (15, 18))
    apart = torch.cdist(one[None], torch.stack([other, one]), p=p)[0]
    np.testing.assert_allclose(scores, -apart.numpy(), atol=1e-4)


def test_lower_case_is_asked_for_beside_the_tokenizer(tmp_path: Path) -> None:
    make(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    # As transformers adds them.
    tokenizer["added_tokens"] = [
        {
            "id": 3,
            "content": "[SEP]",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    change(tmp_path / "tokenizer.json", **tokenizer)
    for lower, ids in ((False, [2, 1, 3, 15, 3]), (True, [2, 5, 3, 15, 3])):
        change(tmp_path / "sentence_bert_config.json", do_lower_case=lower)
        with LLM(tmp_path) as llm:
            assert llm.embed("THE [SEP] rain")[0].prompt_token_ids == ids


def test_positions_begin_after_a_token(tmp_path: Path) -> None:
    model = make(tmp_path, "roberta", pad_token_id=0)
    tensors = load_file(tmp_path / "model.safetensors")
    # Buffers that older versions of transformers saved.
    tensors["embeddings.position_ids"] = torch.arange(40)[None]
    tensors["embeddings.token_type_ids"] = torch.zeros(1, 40, dtype=torch.long)
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path) as llm:
        (output,) = llm.embed([[9, 0, 7, 30]])
    expected = unit(wanted(model, [9, 0, 7, 30], "mean"))
    np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)
    for bad in (-1, "1"):
        with pytest.raises(ConfigError, match=f"pad_token_id must be a token id, got {bad!r}"):
            LLM(tmp_path, hf_overrides={"pad_token_id": bad})


@pytest.mark.parametrize("kinds", [("mean",), ("mean", "cls")])
def test_padding_that_a_text_names_has_roberta_s_position(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    model = make(tmp_path, "roberta")
    write_modules(tmp_path, {"pooling_mode": list(kinds)}, normalize=False)
    given = [[1], [2, 9, 1, 9, 3], [1, 1, 7], [2, 9, 3], [2, 1, 1, 30, 1, 4]]
    with LLM(tmp_path) as llm:
        outputs = llm.embed(given)
    for ids, output in zip(given, outputs, strict=True):
        expected = np.concatenate([wanted(model, ids, kind) for kind in kinds])
        np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)


def test_a_model_does_its_own_task_alone(tmp_path: Path) -> None:
    make(tmp_path)
    for task, message in (("generate", "no next token"), ("score", "is made to embed")):
        with pytest.raises(OptionError, match=message):
            LLM(tmp_path, task=task)
    for name, value in (("swap_space", "1MiB"), ("block_size", 8)):
        with pytest.raises(OptionError, match=f"{name} is set, and means nothing"):
            LLM(tmp_path, **{name: value})
    with LLM(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"'embed'.*use LLM.embed or .* /v1/embeddings of"):
            llm.generate("rain", SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match=r"runs for the task 'embed'"):
            llm.chat([{"role": "user", "content": "rain"}])
        with pytest.raises(RequestError, match=r"runs for the task 'embed'"):
            next(llm.stream_chat([{"role": "user", "content": "rain"}]))
        with pytest.raises(RequestError, match="dimensions 8: this model is not said"):
            llm.embed("rain", PoolingParams(dimensions=8))
        whole = llm.embed("rain", PoolingParams(dimensions=48))[0].outputs
        assert whole.embedding == llm.embed("rain")[0].outputs.embedding
        assert llm.embed([]) == []


@pytest.mark.parametrize("most", [0, -2, True, 2.5, "3"])
def test_lengths_that_are_none_are_refused(most: Any, tmp_path: Path) -> None:
    make(tmp_path)
    with LLM(tmp_path) as llm:
        for prompt in ("rain", [9, 8, 7, 6]):
            with pytest.raises(RequestError, match="truncate_prompt_tokens must be a positive"):
                llm.embed([prompt], truncate_prompt_tokens=most)
        with pytest.raises(RequestError, match=r"no prompt \['query'\]; it has none"):
            llm.embed("rain", prompt_name=["query"])  # type: ignore[arg-type]


def test_vectors_may_be_cut_where_the_model_says_so(tmp_path: Path) -> None:
    model = make(tmp_path)
    some = EngineConfig(hf_overrides={"matryoshka_dimensions": [8, 16]})
    with LLM(tmp_path, some) as llm:
        output = llm.embed([[9, 8, 7]], PoolingParams(dimensions=16))[0]
        with pytest.raises(RequestError, match=r"dimensions 9 is none .* it has 8, 16"):
            llm.embed([[9]], PoolingParams(dimensions=9))
    expected = unit(wanted(model, [9, 8, 7], "mean")[:16])
    np.testing.assert_allclose(output.outputs.vector, expected, atol=1e-5)
    with LLM(tmp_path, hf_overrides={"is_matryoshka": True}) as llm:
        assert len(llm.embed([[9]], PoolingParams(dimensions=9))[0].outputs.vector) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_cross_encoder_scores_pairs(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, kind, scores=True)
    query, documents = "the cat sat", ["a dog ran far", "rain", "the cat sat on the mat"]
    with LLM(tmp_path) as llm:
        outputs = llm.score(query, documents)
        raw = llm.score([query] * 3, documents, PoolingParams(activate=False))
        (cut,) = llm.score(query, documents[2], truncate_prompt_tokens=9)
        with pytest.raises(RequestError, match="gives no vectors; use score"):
            llm.embed(query)
        with pytest.raises(RequestError, match="2 texts are given with 3 others"):
            llm.score([query] * 2, documents)
    for output, plain in zip(outputs, raw, strict=True):
        ids = output.prompt_token_ids
        types = [0] * 5 + [1] * (len(ids) - 5) if kind == "bert" else [0] * len(ids)
        with torch.no_grad():
            given = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        logit = given.logits.item()
        assert math.isclose(plain.outputs.score, logit, abs_tol=1e-5)
        assert math.isclose(output.outputs.score, 1 / (1 + math.exp(-logit)), abs_tol=1e-5)
    # The longer text is cut first.
    assert cut.prompt_token_ids == [2, 5, 7, 9, 3, 5, 7, 9, 3]


def logits(model: Any, folder: Path, one: str, other: str, **more: Any) -> tuple[list[int], float]:
    """The tokens of a pair, and what transformers makes of them."""
    inputs = AutoTokenizer.from_pretrained(folder)(one, other, return_tensors="pt", **more)
    with torch.no_grad():
        return inputs["input_ids"][0].tolist(), model(**inputs).logits.item()


def test_types_are_for_models_whose_tokenizer_names_them(tmp_path: Path) -> None:
    model = make(tmp_path, scores=True)
    scores = {}
    for names in (["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]):
        change(tmp_path / "tokenizer_config.json", model_input_names=names)
        ids, expected = logits(model, tmp_path, "rain", "the cat sat")
        with LLM(tmp_path) as llm:
            (output,) = llm.score("rain", "the cat sat", PoolingParams(activate=False))
        assert output.prompt_token_ids == ids
        assert math.isclose(output.outputs.score, expected, abs_tol=1e-5)
        scores[names[1]] = expected
    assert not math.isclose(*scores.values(), abs_tol=0.01)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_at_the_side_that_the_tokenizer_says(side: str, tmp_path: Path) -> None:
    make(tmp_path, scores=True)
    change(tmp_path / "tokenizer_config.json", truncation_side=side)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    one, other = "the cat sat on the mat", "a dog ran far and rain is near"
    cut = {"truncation": True, "max_length": 9}
    with LLM(tmp_path) as llm:
        (output,) = llm.score(one, other, truncate_prompt_tokens=9)
        (alone,) = llm.engine.frontend.tokenize_all([one], most=4)
        (ids,) = llm.engine.frontend.tokenize_all([[9, 8, 7, 6]], most=3)
    assert output.prompt_token_ids == theirs(one, other, **cut)["input_ids"]
    assert alone.token_ids == theirs(one, truncation=True, max_length=4)["input_ids"]
    assert list(ids.token_ids) == list(ids.packed) == ([8, 7, 6] if side == "left" else [9, 8, 7])
    change(tmp_path / "tokenizer_config.json", truncation_side="middle")
    with pytest.raises(TokenizerError, match="truncation_side must be 'left' or 'right', got 'mid"):
        LLM(tmp_path)


@pytest.mark.parametrize("own", ["Sigmoid", None])
def test_a_cross_encoder_that_sentence_transformers_saved(own: str | None, tmp_path: Path) -> None:
    """Since version 6 it has a ``modules.json``, and what config.json said is in another file."""
    model = make(tmp_path, scores=True)
    write_modules(
        tmp_path,
        {},
        activation_fn="torch.nn.modules.linear.Identity",
        prompts={"query": "the cat ", "empty": None},
        default_prompt_name="query",
    )
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps(modules[:1]))
    change(tmp_path / "tokenizer_config.json", model_max_length=12)
    told = None if own is None else {"activation_fn": f"torch.nn.modules.activation.{own}"}
    with LLM(tmp_path, hf_overrides={"sentence_transformers": told}) as llm:
        assert llm.engine.max_model_len == 12
        outputs = llm.score("rain", ["sun", "a dog ran far " * 9], truncate_prompt_tokens=-1)
    for output, other in zip(outputs, ("sun", "a dog ran far " * 9), strict=True):
        cut = {"truncation": True, "max_length": 12}
        ids, expected = logits(model, tmp_path, "the cat rain", other, **cut)
        assert output.prompt_token_ids == ids
        assert math.isclose(output.outputs.score, expected, abs_tol=1e-5)
    change(tmp_path / "config_sentence_transformers.json", activation_fn="torch.nn.Tanh")
    with pytest.raises(ConfigError, match=r"transformers.json: activation_fn 'torch.nn.Tanh' is"):
        LLM(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="Transformer, Pooling, Normalize are not supported for"):
        LLM(tmp_path)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    make(tmp_path, scores=True)
    with pytest.raises(ConfigError, match="has 3 labels"):
        LLM(tmp_path, hf_overrides={"id2label": {"0": "a", "1": "b", "2": "c"}})
    told = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    with pytest.raises(ConfigError, match=r"activation_fn '.*Tanh' is not one"):
        LLM(tmp_path, hf_overrides=told)


def test_the_check_says_what_it_is_for(tmp_path: Path) -> None:
    make(tmp_path)
    report = check_model(tmp_path, deep=True)
    assert report.will_run
    assert [problem.code for problem in report.problems] == ["comparison-unavailable"]
    assert report.problems[0].hint.startswith("Compare what LLM.embed or LLM.score gives")
    assert report.model_info is not None
    assert report.model_info.config["pooling"]["kinds"] == ("mean",)
    assert report.memory is not None
    assert (report.memory.cache_bytes, report.memory.groups) == (0, ())
