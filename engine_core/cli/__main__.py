"""``python -m engine_core.cli`` is the ``engine-core`` command."""

from engine_core.cli import main

if __name__ == "__main__":
    main()
