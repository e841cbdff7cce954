import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Every test has a disk cache of its own."""
    home = tmp_path_factory.mktemp("cache-home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "engine-core"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, which ``make models`` fetches."""
    named = os.environ.get("ENGINE_CORE_TEST_SMOLLM2")
    path = Path(named or REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    if not path.is_file():
        pytest.fail(f"{path} is not there; run 'make models' or set ENGINE_CORE_TEST_SMOLLM2")
    return path


@pytest.fixture(scope="session")
def llama_adapters() -> dict[str, type]:
    from engine_core_llama.gguf import LlamaGGUFAdapter

    return {"llama": LlamaGGUFAdapter}


@pytest.fixture(scope="session")
def golden_llama():
    """Reads a golden Llama checkpoint: its config and its tensors in numpy."""
    import json

    from safetensors.numpy import load_file

    def read(name: str):
        folder = REPOSITORY / "tests" / "golden" / name
        config = json.loads((folder / "config.json").read_text())
        return folder, config, load_file(folder / "model.safetensors")

    return read
