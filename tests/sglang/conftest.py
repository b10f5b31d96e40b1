"""A real service for the tests beside SGLang's code."""

from collections.abc import Iterator

import pytest

from service.settings import Settings
from tests.service.pair import publish
from tests.service.threaded import Running, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With the mapper of the tests' pair."""
    root = tmp_path_factory.mktemp("artifacts")
    publish(root)
    with serving(Settings(artifacts=(root,), shadow_rate=0)) as found:
        yield found
