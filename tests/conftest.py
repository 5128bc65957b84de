"""Fixtures shared by all tests: one real Temporal dev server per session."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from hypothesis import Phase, settings
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from ratchet.activities.contracts.wire import WIRE
from ratchet.worker.client import register_search_attributes
from ratchet.worker.temporal_server import DYNAMIC_CONFIG

# How long an example takes says more about the machine than about the code.
settings.register_profile("ratchet", deadline=None)
settings.load_profile("ratchet")
# For `make mutants`: a verdict is the same each time, and no failure is made smaller.
settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)

TEMPORAL = Path(sys.executable).parent / "temporal"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[Client]:
    """A client of a fresh in-memory dev server, with our search attributes registered."""
    extra = [word for setting in DYNAMIC_CONFIG for word in ("--dynamic-config-value", setting)]
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(TEMPORAL),
        dev_server_extra_args=extra,
        data_converter=WIRE,
    ) as environment:
        await register_search_attributes(environment.client)
        yield environment.client
