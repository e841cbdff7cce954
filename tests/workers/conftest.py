"""Templates are processes of their own here, as a user's are."""

from collections.abc import Iterator

import forkserver
import pytest


@pytest.fixture(autouse=True, scope="module")
def processes_of_their_own() -> Iterator[None]:
    forkserver.templates_afresh()
    yield
    forkserver.templates_from_here()
