"""Memory and compute capability of common GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.errors import ConfigError

# What the driver reports for the whole device in MiB, a little less than the name says; for cards
# with error correction on, as they are sold. Then the compute capability, and multiprocessors.
_GPUS = {
    "T4": (15360, (7, 5), 40),
    "V100-16GB": (16384, (7, 0), 80),
    "V100-32GB": (32768, (7, 0), 80),
    "A10": (23028, (8, 6), 72),
    "A10G": (23028, (8, 6), 80),
    "A16": (15356, (8, 6), 10),
    "A30": (24576, (8, 0), 56),
    "A40": (46068, (8, 6), 84),
    "A100-40GB": (40960, (8, 0), 108),
    "A100-80GB": (81920, (8, 0), 108),
    "A800-80GB": (81920, (8, 0), 108),
    "L4": (23034, (8, 9), 58),
    "L40": (46068, (8, 9), 142),
    "L40S": (46068, (8, 9), 142),
    "H20": (97871, (9, 0), 78),
    "H100": (81559, (9, 0), 132),
    "H100-PCIE": (81559, (9, 0), 114),
    "H100-NVL": (95830, (9, 0), 132),
    "H800": (81559, (9, 0), 132),
    "GH200-96GB": (97871, (9, 0), 132),
    "H200": (143771, (9, 0), 132),
    "B200": (183359, (10, 0), 148),
    "RTX-3060-12GB": (12288, (8, 6), 28),
    "RTX-3090": (24576, (8, 6), 82),
    "RTX-4060-TI-16GB": (16380, (8, 9), 34),
    "RTX-4070": (12282, (8, 9), 46),
    "RTX-4080": (16376, (8, 9), 76),
    "RTX-4090": (24564, (8, 9), 128),
    "RTX-5080": (16303, (12, 0), 84),
    "RTX-5090": (32607, (12, 0), 170),
    "RTX-6000-ADA": (49140, (8, 9), 142),
    "RTX-A6000": (49140, (8, 6), 84),
}


@dataclass(frozen=True, slots=True)
class NamedGPU:
    """A kind of GPU, which need not be in this machine.

    Attributes:
        name: its full name.
        memory: bytes of it.
        capability: its compute capability.
        multiprocessors: how many it has.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int


def gpu_names() -> tuple[str, ...]:
    """The names that :func:`find_gpu` knows."""
    return tuple(_GPUS)


def find_gpu(name: str, advice: str = "") -> NamedGPU:
    """The GPU of this name.

    Case, spaces, hyphens and "NVIDIA" do not matter, and a part of a name is enough if only one
    GPU has it: ``"rtx 4090"``, ``"4090"``, ``"A100 80GB"``. ``advice`` ends the message for a name
    that is unknown: what else the caller takes.

    Raises:
        ConfigError: the name is unknown or stands for several.
    """
    wanted = _plain(name)
    matches = [known for known in _GPUS if _plain(known) == wanted] or [
        known for known in _GPUS if wanted and wanted in _plain(known)
    ]
    if len(matches) == 1:
        mib, capability, multiprocessors = _GPUS[matches[0]]
        return NamedGPU(matches[0], mib * 2**20, capability, multiprocessors)
    if matches:
        raise ConfigError(f"the GPU {name!r} may be any of {', '.join(matches)}; say which")
    raise ConfigError(f"the GPU {name!r} is not in the table; known are {', '.join(_GPUS)}{advice}")


def _plain(name: str) -> str:
    plain = "".join(character for character in name.upper() if character.isalnum())
    return plain.replace("NVIDIA", "").replace("GEFORCE", "")
