"""AutoRound's settings as those of GPTQ and AWQ, whose layouts it packs integers in.

By auto_round/export/export_to_autoround and auto_round/inference/backend.py, as AutoRound has them
since April 2025. ``packing_format`` says which layout it is. That named for AutoGPTQ keeps zeros
less one, as GPTQ's first version does, and AutoRound's own keeps them as they are, as the second
does; neither orders inputs. Earlier versions write ``backend`` in its place, which is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine_core.nn.quantization.fp8_checkpoint import check_pattern, unsupported

_METHODS = ("auto-round", "intel/auto-round")
_GPTQ = {"quant_method": "gptq", "desc_act": False}
_V1, _V2 = _GPTQ | {"checkpoint_format": "gptq"}, _GPTQ | {"checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "version": "gemm"}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "auto_round:auto_gptq": _V1,
    "auto_round:gptq": _V1,
    "auto_round": _V2,
    "auto_round:gptqmodel": _V2,
    "auto_round:auto_awq": _AWQ,
    "auto_round:awq": _AWQ,
}
WHOLE_ACTIVATIONS = (16, 32, None)
"""Values of ``act_bits`` by which activations are not quantised."""
# Of a layer: whether zeros are the middle, which the tensors say, how activations are quantised
# that are not, and what the calibration did.
_PASSED_OF_LAYERS = (
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym", "sym"),
    *("fixed_by_user", "in_blocks", "scale_dtype"),
)


def method_of(settings: Mapping[str, Any]) -> object:
    """The ``quant_method``; of AutoRound's that of its layout, gptq where that is not known."""
    method = settings.get("quant_method")
    if method not in _METHODS:
        return method
    return _LAYOUTS.get(str(settings.get("packing_format")), _GPTQ)["quant_method"]


def as_layout(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The settings of GPTQ or AWQ for a checkpoint of AutoRound; those of others as they are.

    Layers that ``extra_config`` leaves at 16 bits get into ``modules_to_not_convert``.

    Raises:
        ConfigError: its layout is not known, or layers differ in more than that.
    """
    if settings is None or settings.get("quant_method") not in _METHODS:
        return settings
    packing = settings.get("packing_format")
    layout = _LAYOUTS.get(packing) if isinstance(packing, str) else None
    if layout is None:
        raise unsupported(
            f"packing_format of AutoRound is {packing!r}, not {' or '.join(map(repr, _LAYOUTS))}"
        )
    for key in layout:
        if key != "quant_method" and settings.get(key) not in (None, layout[key]):
            raise unsupported(f"{key} is {settings[key]!r} and packing_format {packing!r}")
    left = ("packing_format", "extra_config")
    made = {key: value for key, value in settings.items() if key not in left} | layout
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise unsupported(f"extra_config is {extra!r}, no settings of layers by name")
    plain = [name for name, given in extra.items() if _is_plain(given)]
    for name in extra.keys() - plain:
        _check_layer(name, extra[name], settings)
    if plain:
        skipped = made.get("modules_to_not_convert") or []
        made["modules_to_not_convert"] = [*skipped, *map(_as_skipped, plain)]
    return made


def _is_plain(given: Mapping[str, Any]) -> bool:
    bits = given.get("bits")
    return type(bits) is int and bits >= 16


def _check_layer(name: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    alike = {key: settings.get(key) for key in ("bits", "data_type", "group_size")}
    alike["data_type"] = alike["data_type"] or "int"
    for key, value in given.items():
        if key == "act_bits":
            same = value in WHOLE_ACTIVATIONS
        elif key in alike:
            same = value is None or value == alike[key]
        else:
            same = key in _PASSED_OF_LAYERS or not value
        if not same:
            raise unsupported(
                f"extra_config gives {name} a {key} of {value!r}, and layers that differ in more "
                "than being left at 16 bits are not known"
            )


def _as_skipped(name: str) -> str:
    """An entry of a skip list; a name may be a pattern that is searched for."""
    if re.fullmatch(r"[\w.-]+", name):
        return name
    check_pattern("extra_config", f"re:{name}")
    return f"re:.*(?:{name})"
