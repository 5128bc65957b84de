"""The official Python client and command line of Ratchet's API.

from ratchet import Ratchet

with Ratchet() as client:
    run = client.runs.create({"name": "reverse", "train": {"env": [{"id": "reverse-text"}]}})
    for event in client.runs.stream_events(run.id):
        print(event.message)
"""

from ratchet.api.client.client import Ratchet, Runs
from ratchet.api.client.errors import NotExported, RatchetError, Refused, Unreachable
from ratchet.api.client.pages import Page
from ratchet.api.client.streams import EventStream

__all__ = [
    "EventStream",
    "NotExported",
    "Page",
    "Ratchet",
    "RatchetError",
    "Refused",
    "Runs",
    "Unreachable",
]
