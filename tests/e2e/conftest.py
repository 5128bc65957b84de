"""What takes long to start, once for all tests: the whole stack, and an engine on its own."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from ratchet.worker.stack import Stack
from tests.e2e.engines import Served, engine
from tests.e2e.trained import Trained, train


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of its own on free ports, not up yet. Runs share it one after the other, and with it
    the store, so that a policy is prepared once.
    """
    os.environ.pop("TEMPORAL_ADDRESS", None)
    made = Stack(tmp_path_factory.mktemp("home"))
    yield made
    made.down()


@pytest.fixture(scope="session")
def trained(stack: Stack) -> Trained:
    """A run of that stack that has ended, whatever was killed on its way."""
    return train(stack)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A vLLM engine; whoever uses it pushes the weights it needs. The last test kills it."""
    async with engine(tmp_path_factory.mktemp("engine")) as started:
        yield started
