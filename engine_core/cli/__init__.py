"""The ``engine-core`` command. torch and the engine are imported only by the commands that run."""

from engine_core import own_process
from engine_core.lazy import lazy_names

__all__ = ["app", "main"]
__getattr__, __dir__ = lazy_names(__name__, {"engine_core.cli.root": "app"})


def main() -> None:
    """Entry point of ``engine-core``; see :func:`engine_core.cli.root.main`."""
    own_process.claim()  # before anything large is imported
    from engine_core.cli.root import main as run

    run()
