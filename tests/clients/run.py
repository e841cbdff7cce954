"""Drive servers with the clients that people use; run by ``make test-clients``.

Each client has an environment of its own, as their requirements exclude each other. This process,
which has the engine, starts two servers: one whose model says what ``scripted.py`` has, and one
with SmolLM2. Then each client's tests run in its environment; the servers' addresses are in
``ENGINE_CORE_SCRIPTED`` and ``ENGINE_CORE_SMOLLM2``.
"""

from __future__ import annotations

import argparse
import os
import string
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from reciting_model import write_scripted_model  # noqa: E402
from scripted import LONGEST, SCRIPTS, TEMPLATE  # noqa: E402
from serving import ServerProcess  # noqa: E402

JAVASCRIPT = "openai_js"


def known() -> list[str]:
    """The names of all clients."""
    return [JAVASCRIPT, *sorted(path.stem for path in (HERE / "requirements").glob("*.txt"))]


def install(client: str, cache: Path) -> Path:
    """Make a client's environment if it is not there; return its folder."""
    folder = cache / client
    if client == JAVASCRIPT:
        wanted = HERE / "openai_js" / "package.json"
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    else:
        wanted = HERE / "requirements" / f"{client}.txt"
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        command += ["--disable-pip-version-check", "-r", str(wanted)]
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted.read_text():
        return folder
    print(f"installing {client} into {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if client == JAVASCRIPT:
        (folder / wanted.name).write_text(wanted.read_text())
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run(command, check=True, cwd=folder)
    stamp.write_text(wanted.read_text())
    return folder


def run_tests(client: str, folder: Path, environment: dict[str, str]) -> int:
    """Run a client's tests; return the exit code."""
    print(f"\n== {client}", flush=True)
    if client == JAVASCRIPT:
        # Modules are looked for beside the file that imports them.
        test = folder / "client.test.mjs"
        test.write_text((HERE / JAVASCRIPT / test.name).read_text())
        command = ["node", "--test", str(test)]
    else:
        command = [str(folder / "bin" / "python"), "-m", "pytest", "-c", str(HERE / "pytest.ini")]
        command += [str(HERE / f"test_{client}.py")]
    return subprocess.run(command, env=environment, cwd=folder, check=False).returncode


def main() -> int:
    """Run the tests of the clients that are named, or of all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(known()))
    parser.add_argument("--cache", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2 as a .gguf file")
    arguments = parser.parse_args()
    unknown = set(arguments.clients) - set(known())
    if unknown:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(known())}")
    clients = arguments.clients or known()
    folders = {client: install(client, arguments.cache.resolve()) for client in clients}
    options = ["--kv-cache-memory", "64MiB", "--served-model-name"]
    with tempfile.TemporaryDirectory() as made:
        model = write_scripted_model(
            Path(made) / "model", SCRIPTS, TEMPLATE, max_length=LONGEST, letters=string.printable
        )
        parsers = ["--tool-parser", "hermes", "--reasoning-parser", "think"]
        with (
            ServerProcess(model, *options, "scripted", *parsers) as scripted,
            ServerProcess(
                arguments.smollm2, *options, "smollm2", "--max-model-len", "1024"
            ) as smollm2,
        ):
            environment = {
                **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                "ENGINE_CORE_SCRIPTED": f"{scripted.wait_ready().url}/v1",
                "ENGINE_CORE_SMOLLM2": f"{smollm2.wait_ready().url}/v1",
                # Where clients would look for a key, a folder of settings, or somebody to tell.
                "OPENAI_API_KEY": "none",
                "HOME": made,
                "DO_NOT_TRACK": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            failed = [
                client
                for client, folder in folders.items()
                if run_tests(client, folder, environment)
            ]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall clients pass", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
