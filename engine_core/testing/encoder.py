"""The check of models that only encode: what their prompts give, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from engine_core.configs import PoolingParams
from engine_core.engine import LLM
from engine_core.runtime.layer_trace import decoder_layers
from engine_core.testing.case import ConformanceError
from engine_core.testing.state import changes, globals_of, snapshot
from engine_core.testing.subject import Family, Subject
from engine_core.testing.trace import Recorder, Trace, explain

# Of the values' own spread.
_TOLERANCE, _BFLOAT16_TOLERANCE = 1e-4, 0.1
_RAW = PoolingParams(normalize=False, activate=False)


def vectors(subject: Subject) -> None:
    """Results of prompts are the reference's: alone, with others, in bfloat16, on two ranks."""
    prompts = [ids for ids, *_ in subject.checkpoint.encoded]
    longest = max(map(len, prompts))
    with _llm(subject) as llm:
        (model,) = llm.apply_model(lambda model: model)
        before = snapshot(model) | globals_of(subject.family.package)
        wanted = _check_alone(subject, llm)
        _check_types(subject, llm)
        _compare(prompts, _run(llm, prompts), wanted, "with all others in one step")
        after = snapshot(model) | globals_of(subject.family.package)
        if found := changes(model, before, after):
            raise ConformanceError(
                f"a step changes the model itself: {', '.join(found)}. What a step needs comes "
                "from its context"
            )
    with _llm(subject, max_num_batched_tokens=longest + 3, max_num_seqs=3) as llm:
        twice, again = [*prompts, *prompts[::-1]], [*wanted, *wanted[::-1]]
        _compare(twice, _run(llm, twice), again, "in steps with some others")
    with _llm(subject, dtype="bfloat16") as llm:
        given = _run(llm, prompts)
    _compare(prompts, given, wanted, "in bfloat16", _BFLOAT16_TOLERANCE)
    family = subject.family
    same = [c for c in family.cases if _class(family, c.architecture) is subject.model_class]
    if same[0] is not subject.case:  # ranks are the class's business
        return
    with _llm(subject, tensor_parallel_size=2) as llm:
        _compare(prompts, _run(llm, prompts), wanted, "on two ranks")


def _check_types(subject: Subject, llm: LLM) -> None:
    """The two texts of a pair are told apart as in the reference, or not at all."""
    if subject.checkpoint.typed is None:
        return
    ids, types, states = subject.checkpoint.typed
    (tokenized,) = llm.engine.frontend.tokenize_all([ids])
    given = llm._pool([tokenized._replace(types=types)], _RAW, 0)[1]
    kind = llm.model_config.pooling.kinds[0] if llm.model_config.pooling else "mean"
    _compare([ids], given, [_pooled(states, kind)], "with token_type_ids, as a pair of texts")


def alone(subject: Subject) -> None:
    """Results of each prompt alone are the reference's."""
    with _llm(subject) as llm:
        _check_alone(subject, llm)


def _check_alone(subject: Subject, llm: LLM) -> list[Any]:
    """The results that prompts must have, which each has had alone."""
    kind = llm.model_config.pooling.kinds[0] if llm.model_config.pooling else "mean"
    checkpoint = subject.checkpoint
    wanted = [_pooled(states, kind) for _, states, _ in checkpoint.encoded]
    for (ids, _, theirs), vector in zip(checkpoint.encoded, wanted, strict=True):
        try:
            _compare([ids], _run(llm, [ids]), [vector], "alone")
        except ConformanceError as error:
            # Not from within apply_model, whose function runs in a step.
            (model,) = llm.apply_model(lambda model: model)
            ours = _traced(llm, ids, model)
            raise ConformanceError(f"{error}. {explain(ours, theirs, checkpoint.prefix)}") from None
    return wanted


def _traced(llm: LLM, ids: list[int], model: Any) -> Trace:
    layers = decoder_layers(model, llm.model_config.num_layers)
    recorder = Recorder(model, layers)
    recorder.begin([(0, position) for position in range(len(ids))])
    with recorder.recording():
        _run(llm, [ids])
    return recorder.trace(0, len(ids))


def _class(family: Family, architecture: str) -> type:
    return family.registry.model_class(architecture)


def _llm(subject: Subject, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    return LLM(subject.folder, **{**defaults, **settings})


def _run(llm: LLM, prompts: Sequence[list[int]]) -> list[Any]:
    tokenized = llm.engine.frontend.tokenize_all(prompts)
    return llm._pool(tokenized, _RAW, 0)[1]


def _pooled(states: Tensor, kind: str) -> Any:
    if states.dim() == 1:
        return states.numpy()
    picked = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[kind]
    return picked.numpy()


def _compare(
    prompts: Sequence[list[int]],
    given: Sequence[Any],
    wanted: Sequence[Any],
    how: str,
    tolerance: float = _TOLERANCE,
) -> None:
    spread = max(float(np.abs(np.concatenate(wanted)).max()), 1e-6)
    for ids, ours, theirs in zip(prompts, given, wanted, strict=True):
        apart = float(np.abs(ours - theirs).max()) / spread
        if not apart <= tolerance:
            raise ConformanceError(
                f"prompt of {len(ids)} tokens, {how}: what it gives is {apart:.1e} off the "
                f"reference's, of the largest number ({tolerance:.0e} is allowed)"
            )
