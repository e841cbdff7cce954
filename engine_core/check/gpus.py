"""How much memory common GPUs have."""

from __future__ import annotations

import difflib

from engine_core.errors import ConfigError

# What the driver reports for the whole device in MiB, a little less than the name says; for cards
# with error correction on, as they are sold.
_MIB = {
    "T4": 15360,
    "V100-16GB": 16384,
    "V100-32GB": 32768,
    "A10": 23028,
    "A10G": 23028,
    "A16": 15356,
    "A30": 24576,
    "A40": 46068,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "A800-80GB": 81920,
    "L4": 23034,
    "L40": 46068,
    "L40S": 46068,
    "H20": 97871,
    "H100": 81559,
    "H100-NVL": 95830,
    "H800": 81559,
    "GH200-96GB": 97871,
    "H200": 143771,
    "B200": 183359,
    "RTX-3060-12GB": 12288,
    "RTX-3090": 24576,
    "RTX-4060-TI-16GB": 16380,
    "RTX-4070": 12282,
    "RTX-4080": 16376,
    "RTX-4090": 24564,
    "RTX-5080": 16303,
    "RTX-5090": 32607,
    "RTX-6000-ADA": 49140,
    "RTX-A6000": 49140,
}


def gpu_names() -> tuple[str, ...]:
    """The names that :func:`gpu_memory` knows."""
    return tuple(_MIB)


def gpu_memory(name: str) -> tuple[str, int]:
    """The GPU's full name and its bytes of memory.

    Case, spaces, hyphens and "NVIDIA" do not matter, and a part of a name is enough if only one
    GPU has it: ``"rtx 4090"``, ``"4090"``, ``"A100 80GB"``.

    Raises:
        ConfigError: the name is unknown or stands for several.
    """
    wanted = _plain(name)
    matches = [known for known in _MIB if _plain(known) == wanted] or [
        known for known in _MIB if wanted and wanted in _plain(known)
    ]
    if len(matches) == 1:
        return matches[0], _MIB[matches[0]] * 2**20
    if matches:
        raise ConfigError(f"the GPU {name!r} may be any of {', '.join(matches)}; say which")
    near = difflib.get_close_matches(name.upper(), _MIB, n=3, cutoff=0.5) or _MIB
    raise ConfigError(
        f"the GPU {name!r} is not in the table; known are {', '.join(near)}; for any other give "
        "the memory itself"
    )


def _plain(name: str) -> str:
    plain = "".join(character for character in name.upper() if character.isalnum())
    return plain.replace("NVIDIA", "").replace("GEFORCE", "")
