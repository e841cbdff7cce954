"""Vectors and scores of BERT and RoBERTa, against transformers' own classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_bert import make, states, write_modules

from engine_core import LLM, EngineConfig, PoolingParams, SamplingParams
from engine_core.check import check_model
from engine_core.errors import ConfigError, OptionError, RequestError

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
        ({"pooling_mode": "mean", "include_prompt": False}, {}, "include_prompt false"),
        ({"pooling_mode": "mean"}, {"similarity_fn_name": "euclidean"}, "'euclidean' is not one"),
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
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ConfigError, match="position_embedding_type 'relative_key'"):
        LLM(tmp_path, hf_overrides={"position_embedding_type": "relative_key"})


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
    with pytest.raises(OptionError, match="swap_space is set, and means nothing"):
        LLM(tmp_path, swap_space="1MiB")
    with LLM(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"runs for the task 'embed'.*use embed or score"):
            llm.generate("rain", SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="dimensions 8: this model is not said"):
            llm.embed("rain", PoolingParams(dimensions=8))
        assert llm.embed([]) == []


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
    assert report.model_info is not None
    assert report.model_info.config["pooling"]["kinds"] == ("mean",)
    assert report.memory is not None
    assert (report.memory.cache_bytes, report.memory.groups) == (0, ())
