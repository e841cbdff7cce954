"""Checks of what the keys of a config mean. They raise as those of ``checks`` do.

The first states, leaves out and doubles keys, and compares what the config builder makes of them.
The second gives every switch another value than the case has, and compares the results.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import ConfigError, EngineError, WeightsMismatchError
from engine_core.testing import checks, encoder
from engine_core.testing.case import ConformanceCase, ConformanceError
from engine_core.testing.reference import (
    encode,
    prepare,
    transformers_class,
    transformers_encoder,
)
from engine_core.testing.subject import BlockedError, NotApplicableError, Subject

Key = tuple[str, ...]
"""Where a key stands: its name, after those of the objects that it is in."""

_TEXTS = ("text_config", "llm_config")
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length")
# Of sizes these may change alone: nothing else in a config follows from them.
_SIZES = (
    "intermediate_size",
    "n_inner",
    "ffn_hidden_size",
    "inner_hidden_size",
    "num_key_value_heads",
    "multi_query_group_num",
    "head_dim",
    "sliding_window",
    "pad_token_id",
)
_ACTIVATIONS = ("gelu", "relu", "silu")
# Switches of many families. One that the reference does not know changes nothing, or the family
# refuses the config or the weights.
_COMMON = {"sliding_window": 5, "attention_bias": True}
# Keys whose default stands for something that follows from others.
_UNSET = {"n_inner": 40}
_ROPES = ("rope_scaling", "rope_parameters")
# What older configs of some families have beside them: the key in rope_parameters that a class of
# transformers makes of each, and a value that is no default.
_OLDER_ROPES: dict[str, tuple[str, Any]] = {
    "rotary_emb_base": ("rope_theta", 3000.0),
    "rotary_pct": ("partial_rotary_factor", 0.5),
}
_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
# Keys whose null means no cap, and no factor.
_FACTOR = re.compile("cap|clip|multiplier")
# A norm's eps that shows among activations of about 1.
_EPS = 0.03


@dataclass(frozen=True)
class _Keys:
    """The keys of a case's config, and the defaults of those that it leaves out."""

    config: dict[str, Any]
    defaults: dict[Key, Any]
    source: str

    @property
    def parts(self) -> list[Key]:
        """The whole config, and the text model's part of it where it has one."""
        return [(), *((name,) for name in _TEXTS if name in self.config)]

    def value(self, key: Key) -> Any:
        return _get(self.config, key, self.defaults.get(key))


def _get(config: Mapping[str, Any], key: Key, default: Any = None) -> Any:
    value: Any = config
    for name in key:
        value = value.get(name) if isinstance(value, Mapping) else None
    return default if value is None else value


def _with(config: Mapping[str, Any], key: Key, value: Any) -> dict[str, Any]:
    """A copy with ``key`` set to ``value``, or taken away if that is None."""
    changed = copy.deepcopy(dict(config))
    inner = changed
    for name in key[:-1]:
        inner = inner.setdefault(name, {})
    inner.pop(key[-1], None)
    if value is not None:
        inner[key[-1]] = value
    return changed


def _changed(config: Mapping[str, Any], changes: Mapping[Key, Any]) -> dict[str, Any]:
    changed = dict(config)
    for key, value in changes.items():
        changed = _with(changed, key, value)
    return changed


def _shown(key: Key) -> str:
    return ".".join(key)


def _keys(subject: Subject) -> _Keys:
    config = json.loads((subject.folder / "config.json").read_text(encoding="utf-8"))
    case = subject.case
    if case.reference != "transformers":
        given = {tuple(key.split(".")): value for key, value in case.defaults.items()}
        return _Keys(config, given, "the original's config class (defaults of the case)")
    theirs = _theirs(case, config)
    return _Keys(config, dict(_own(theirs, config)), type(theirs).__name__)


def _theirs(case: ConformanceCase, config: Mapping[str, Any]) -> Any:
    if case.encodes:
        with torch.device("meta"):  # Its weights are not wanted: by default it has 110 million.
            return transformers_encoder(config).config
    return transformers_class(config)[0]


@cache
def _common_keys() -> frozenset[str]:
    """The keys that configs of all of transformers' classes have."""
    from transformers import PreTrainedConfig

    return frozenset(PreTrainedConfig().to_dict())


def _own(theirs: Any, config: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The keys of transformers' config object that are its class's own, with those inside."""
    from transformers import PreTrainedConfig

    common = _common_keys()
    values = theirs.to_dict()
    values.setdefault("tie_word_embeddings", None)
    for name, value in values.items():
        inner = getattr(theirs, name, None)
        if isinstance(inner, PreTrainedConfig):
            # A flat config has the text model's keys beside the others.
            place = (*path, name) if name in config else path
            if name in config or name in _TEXTS:
                yield from _own(inner, config.get(name) or config, place)
        elif name not in common and not name.startswith("_"):
            yield (*path, name), value


def _build(subject: Subject, config: Mapping[str, Any]) -> ModelConfig | None:
    """The model config; None if the family refuses it."""
    try:
        return subject.family.registry.model_config(HFConfig(config), subject.folder)
    except EngineError:
        return None


def config_values(subject: Subject) -> None:
    """Keys that are left out have the class's defaults; ends and lengths are as stated."""
    assert subject.model_config is not None, "built by the registry"
    keys = _keys(subject)
    _check_ends(subject, keys)
    _check_length(subject, keys)
    for key in keys.defaults:
        _check_default(subject, keys, key)
    _check_aliases(subject, keys)
    _check_older_ropes(subject, keys)
    if subject.case.reference == "transformers":
        _check_bare(subject, keys)


def _check_ends(subject: Subject, keys: _Keys) -> None:
    for given in (5, [5, 7]):
        config = keys.config
        for path in keys.parts:
            config = _with(config, (*path, "eos_token_id"), given)
        built = _build(subject, config)
        wanted = given if isinstance(given, list) else [given]
        if built is not None and not set(wanted) <= set(built.eos_token_ids):
            raise ConformanceError(
                f"with eos_token_id {given} in config.json, ModelConfig.eos_token_ids is "
                f"{built.eos_token_ids}: answers would not end there"
            )

    # A part may have ends of its own; the whole's go before them.
    built = _build(subject, _with(keys.config, ("eos_token_id",), [5, 7]))
    if len(keys.parts) > 1 and built is not None and not {5, 7} <= set(built.eos_token_ids):
        raise ConformanceError(
            "with eos_token_id [5, 7] in config.json beside that of its parts, "
            f"ModelConfig.eos_token_ids is {built.eos_token_ids}: answers would not end there"
        )


def _check_aliases(subject: Subject, keys: _Keys) -> None:
    """A key is read by another name that the class has for it, or refused under that."""
    if subject.case.reference != "transformers":
        return
    names = type(_theirs(subject.case, keys.config)).attribute_map
    for alias, name in [*names.items(), *((name, alias) for alias, name in names.items())]:
        value = keys.config.get(name)
        if value is None or alias in keys.config:
            continue
        built = _build(subject, _with(_with(keys.config, (name,), None), (alias,), value))
        if built is None:
            continue
        for what, ours, theirs in _differences(built, subject.model_config):
            raise ConformanceError(
                f"with {alias} {value!r} in config.json, another name of {name} in {keys.source}, "
                f"{what} is {ours!r} in place of {theirs!r}: read both names"
            )


def _check_older_ropes(subject: Subject, keys: _Keys) -> None:
    """Keys that stood beside ``rope_parameters`` in older configs are read, or refused."""
    if subject.case.reference != "transformers":
        return
    bare = keys.config
    for name in ("rope_theta", "partial_rotary_factor", *_ROPES, *_OLDER_ROPES):
        bare = _with(bare, (name,), None)
    for name, (newer, value) in _OLDER_ROPES.items():
        older = _with(bare, (name,), value)
        theirs = _theirs(subject.case, older)
        rope = getattr(theirs, "rope_parameters", None)
        if hasattr(theirs, name) or not isinstance(rope, Mapping) or rope.get(newer) != value:
            continue  # The class knows no such key.
        built = _build(subject, older)
        stated = _build(subject, _with(bare, ("rope_parameters",), dict(rope)))
        if built is None or stated is None:
            continue
        for what, ours, other in _differences(built, stated):
            raise ConformanceError(
                f"with {name} {value!r} in config.json, which {keys.source} takes for {newer} of "
                f"rope_parameters, {what} is {ours!r} in place of {other!r}: read both names, such "
                "as by the aliases of a RotaryConfigBuilder"
            )


def _check_length(subject: Subject, keys: _Keys) -> None:
    stated = {
        (*path, name): _get(keys.config, (*path, name))
        for path in keys.parts
        for name in _LENGTHS
        if type(_get(keys.config, (*path, name))) is int
    }
    if not stated:
        return
    length, config = subject.model_config.max_position_embeddings, keys.config
    for key, value in stated.items():
        config = _with(config, key, 2 * value)
    built = _build(subject, config)
    names = " and ".join(map(_shown, stated))
    if built is not None and built.max_position_embeddings <= length:
        raise ConformanceError(
            f"ModelConfig.max_position_embeddings is {length}, and with twice the {names} "
            f"{built.max_position_embeddings}: it does not follow from what the config states"
        )
    if subject.case.encodes and subject.case.reference == "transformers":
        _check_longest(subject, keys, length)


def _check_longest(subject: Subject, keys: _Keys, length: int) -> None:
    """The reference takes a prompt of the longest length, and no longer one."""
    model = transformers_encoder(keys.config).float().eval()
    taken = []
    for count in (length, length + 1):
        try:
            encode(model, [4] * count)
            taken.append(count)
        except (IndexError, RuntimeError):
            pass
    if taken != [length]:
        raise ConformanceError(
            f"ModelConfig.max_position_embeddings is {length}, but {keys.source}'s model takes "
            f"{'longer prompts' if taken else 'no prompt as long'}"
        )


def _check_default(subject: Subject, keys: _Keys, key: Key) -> None:
    """The family reads a config without the key as one that states its default."""
    without = _with(keys.config, key, None)
    if key[-1] == "rope_parameters":  # Older configs have the same beside it.
        for name in ("rope_theta", "rope_scaling", "partial_rotary_factor", *_OLDER_ROPES):
            without = _with(without, (*key[:-1], name), None)
    default = keys.defaults[key]
    if subject.case.reference == "transformers":
        try:
            default = dict(_own(_theirs(subject.case, without), without)).get(key)
            json.dumps(default)
        except Exception:  # It has none without the key, or none that a config.json could state.
            return
    if key[-1].endswith(("_token_id", "_token_index")):  # A tiny vocabulary may not have it.
        for size in [(*path, "vocab_size") for path in keys.parts]:
            if _get(without, size) is not None:
                without = _with(without, size, 2**20)
    left_out, stated = _build(subject, without), _build(subject, _with(without, key, default))
    if default is None or left_out is None:
        return
    if stated is None:  # Tiny sizes may not go with it.
        given = _get(left_out.hf_config.to_dict(), key)
        heads = left_out.num_attention_heads  # As many are a safe reading.
        if key[-1] == "num_key_value_heads" and given not in (default, heads):
            raise ConformanceError(
                f"without {_shown(key)} in config.json {_shown(key)} is {given!r}; its default in "
                f"{keys.source} is {default!r}"
            )
        return
    for name, ours, theirs in _differences(left_out, stated):
        if name == "eos_token_ids" and not ours:
            continue  # Then others say them.
        if name == "bos_token_id" and ours is None:
            continue
        if key[-1] == "tie_word_embeddings" and len(keys.parts) > 1:
            continue  # Several parts may say it, and weights that contradict it are refused.
        raise ConformanceError(
            f"without {_shown(key)} in config.json {name} is {ours!r}; with {default!r}, its "
            f"default in {keys.source}, it is {theirs!r}"
        )


def _check_bare(subject: Subject, keys: _Keys) -> None:
    """A config that states next to nothing is read as one that states all defaults."""
    bare = _bare(keys.config)
    try:
        stated = bare
        for key, value in _own(_theirs(subject.case, bare), bare):
            if value is not None and not key[-1].endswith("_token_id"):
                stated = _with(stated, key, value)
        json.dumps(stated)
    except Exception:
        return
    ours, theirs = _build(subject, bare), _build(subject, stated)
    for name, mine, other in () if ours is None or theirs is None else _differences(ours, theirs):
        if "tie_word_embeddings" not in name:
            raise ConformanceError(
                f"in a config.json that states next to nothing {name} is {mine!r}; with the "
                f"defaults of {keys.source} it is {other!r}"
            )


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what has a default; what it says of tokens stays."""
    kept = ("architectures", "model_type", "rope_scaling", "rope_parameters")
    return {
        key: _bare(value) if key.endswith("_config") else value
        for key, value in config.items()
        if key in kept or key.endswith(("_config", "_token_id", "_token_index"))
    }


def _differences(one: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    for name in type(one).model_fields:
        ours, theirs = getattr(one, name), getattr(other, name)
        if name == "hf_config":
            yield from _unlike(ours.to_dict(), theirs.to_dict(), "hf_config.")
        elif name != "text_model" and ours != theirs:
            yield name, ours, theirs


def _unlike(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """The values of common keys that differ."""
    for key in one.keys() & other.keys():
        ours, theirs = one[key], other[key]
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _unlike(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            yield f"{prefix}{key}", ours, theirs


def switches(subject: Subject) -> None:
    """Each switch of the config has the effect that it has in the reference.

    As many as go together have other values at once; if that shows a difference, each has alone.
    """
    _require_first(subject)
    keys = _keys(subject)
    left = dict(_changes(subject, keys))
    if not left:
        raise NotApplicableError("the config has no switches that the family takes")
    while left:
        together = _together(subject, keys, left)
        left = {key: value for key, value in left.items() if key not in together}
        failure = _try(subject, keys, together)
        if failure is None:
            continue
        for key, value in together.items():
            alone = _try(subject, keys, {key: value})
            if alone is not None and not isinstance(alone, _NoReferenceError):
                raise ConformanceError(_told(keys, {key: value}, alone)) from alone
        if not isinstance(failure, _NoReferenceError):
            raise ConformanceError(_told(keys, together, failure)) from failure


def scalings(subject: Subject) -> None:
    """Rope scalings that the family takes are the reference's, and so is a warm cache's prompt."""
    _require_first(subject)
    keys = _keys(subject)
    part = keys.parts[-1]
    if subject.case.encodes or any(_get(keys.config, (*part, name)) for name in _ROPES):
        raise NotApplicableError("it is an encoder, or the case has a scaling of its own")
    of_class = [c for c in subject.family.cases if c.architecture == subject.case.architecture]
    shown = {kind for case in of_class for kind in _SCALINGS if f"'{kind}'" in str(case.config)}
    tried = False
    for kind, numbers in _SCALINGS.items():
        changes = {(*part, "rope_scaling"): {"rope_type": kind, **numbers}}
        config = _changed(keys.config, changes)
        if kind in shown or not _is_taken(subject, config):
            continue
        tried = True
        failure = _try(subject, keys, changes)
        if kind == "dynamic" and (failure is None or isinstance(failure, _NoReferenceError)):
            failure = _prefixes(subject, config)
        if failure is not None and not isinstance(failure, _NoReferenceError):
            raise ConformanceError(_told(keys, changes, failure)) from failure
    if not tried:
        raise NotApplicableError("the family takes no rope scaling beside those of its cases")


def _prefixes(subject: Subject, config: Mapping[str, Any]) -> Exception | None:
    """The failure of shared prefixes with the same weights and another config; None if none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        shutil.copytree(subject.folder, folder)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        checkpoint = replace(subject.checkpoint, folder=folder)
        try:
            checks.shared_prefixes(Subject(subject.family, subject.case, checkpoint))
        except NotApplicableError:
            return None
        except Exception as error:
            return error
    return None


def _together(subject: Subject, keys: _Keys, changes: Mapping[Key, Any]) -> dict[Key, Any]:
    """The first of the changes, and all that the family takes beside it.

    What switches a part off would hide what others change in it.
    """
    taken: dict[Key, Any] = {}
    config = keys.config
    off = all(value is False for value in changes.values())
    for key, value in changes.items():
        if value is False and not off:
            continue
        changed = _with(config, key, value)
        known = key in keys.defaults or keys.value(key) is not None
        if not taken or (known and _build(subject, changed) is not None):
            taken[key], config = value, changed
            if not known:
                break  # The reference does not know it: the model may refuse the weights.
    return taken


class _NoReferenceError(Exception):
    """The reference cannot be had from a changed config."""


def _told(keys: _Keys, changes: Mapping[Key, Any], failure: Exception) -> str:
    named = ", ".join(
        f"{_shown(key)} {value!r} in place of {keys.value(key)!r}" for key, value in changes.items()
    )
    said = str(failure).rstrip(".")
    return (
        f"with {named} in config.json: {said}. Read it in the model, or have the config builder "
        "refuse other values"
    )


def _require_first(subject: Subject) -> None:
    case, cases = subject.case, subject.family.cases
    if isinstance(case.reference, Path):
        raise NotApplicableError("golden files are of one config")
    first = next(
        c
        for c in cases
        if c.architecture == case.architecture and not isinstance(c.reference, Path)
    )
    if first is not case:
        raise NotApplicableError(f"the case {first.name!r} shows it for this architecture")


def _changes(subject: Subject, keys: _Keys) -> Iterator[tuple[Key, Any]]:
    """Keys that the family takes with another value, and that value."""
    given = dict(_leaves(keys.config))
    common = [(name,) for name in _COMMON if subject.case.reference == "transformers"]
    for key in (*keys.defaults, *(key for key in (*given, *common) if key not in keys.defaults)):
        for value in _others(key, keys.value(key)):
            if value != keys.value(key) and _is_taken(subject, _with(keys.config, key, value)):
                yield key, value
                break


def _is_taken(subject: Subject, config: Mapping[str, Any]) -> bool:
    """Whether the family builds a model from a config."""
    variant = Subject(subject.family, subject.case, subject.checkpoint)
    try:
        variant.model_config = subject.family.registry.model_config(
            HFConfig(config), subject.folder
        )
        variant.on_meta()
    except (EngineError, BlockedError):
        return False
    return True


def _leaves(config: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, Any]]:
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _others(key: Key, value: Any) -> Iterator[Any]:
    """Values for a switch that has ``value``."""
    name = key[-1]
    if isinstance(value, bool):
        # Of parts that tie the whole decides, and weights that contradict it are refused.
        if name != "use_cache" and (name != "tie_word_embeddings" or len(key) == 1):
            yield not value
    elif isinstance(value, float):
        yield from () if value == 0 else (_EPS if value < 1e-3 else 1.5 * value,)
    elif name == "rope_parameters" and isinstance(value, Mapping):
        yield {name: _faster(inner) for name, inner in _faster(value).items()}
    elif name == "layer_types" and isinstance(value, list):
        yield value[::-1]
    elif name.endswith(("_act", "_activation", "activation_function")):
        yield from (other for other in _ACTIVATIONS if other != value)
    elif name in _SIZES and type(value) is int:
        yield from (value // 2, value + 1, 2 * value)
    elif value is None and name in {**_COMMON, **_UNSET}:
        yield {**_COMMON, **_UNSET}[name]
    elif value is None and _FACTOR.search(name):
        yield 3.0


def _faster(rope: Any) -> Any:
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return rope
    return {**rope, "rope_theta": rope["rope_theta"] * 0.3}


def _try(
    subject: Subject,
    keys: _Keys,
    changes: Mapping[Key, Any],
    scale: float = 1.0,
) -> Exception | None:
    """The failure of the model with a changed config; None if it has none."""
    config = _changed(keys.config, changes)
    case = subject.case
    given = None if case.prompts is None else [*case.prompts[:1], *case.prompts[-1:]]
    case = replace(case, config=config, prompts=given, media=case.media[-1:])
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint = prepare(case, Path(folder), count=1, scale=scale)
        except Exception as error:
            return _NoReferenceError(str(error))
        variant = Subject(subject.family, case, checkpoint)
        try:
            if case.encodes:
                encoder.alone(variant)
            elif scale != 1:
                _check_rows(variant)
            else:
                checks.logits(variant)
        except Exception as error:
            cause = error.cause if isinstance(error, BlockedError) else error
            unknown = not changes.keys() & keys.defaults
            refused = unknown and isinstance(cause, ConfigError | WeightsMismatchError)
            return None if refused else cause
    return None


# Of a row's logits, of activations so small that eps is about their square.
_FAINT, _FAINT_TOLERANCE = 2e-3, 2e-4


def norms_eps(subject: Subject) -> None:
    """Norms have the reference's eps, which shows where what they normalise is faint."""
    _require_first(subject)
    failure = _try(subject, _keys(subject), {}, _FAINT)
    if failure is not None and not isinstance(failure, _NoReferenceError):
        raise ConformanceError(
            f"with all linears and embeddings at {_FAINT} of their size, so that the eps of norms "
            f"counts: {failure}"
        ) from failure


def _check_rows(subject: Subject) -> None:
    runs = subject.run_alone(subject.model, lambda sequence: [(0, len(sequence.token_ids))])
    for prompt, run in zip(subject.checkpoint.prompts, runs, strict=True):
        ours, theirs = run.logits[0], prompt.logits
        apart = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        if not float(apart.nan_to_num(nan=torch.inf).max()) <= _FAINT_TOLERANCE:
            raise ConformanceError(
                f"prompt {prompt.name!r}: logits differ from {subject.checkpoint.source} by "
                f"{float(apart.max()):.2%} of their size ({_FAINT_TOLERANCE:.2%} is allowed), most "
                f"at position {int(apart.argmax())}. "
                + checks.place(run, prompt, subject.checkpoint.prefix)
            )
