"""What rollouts need of a run's policy whatever its version: tokenizer, renderer, vocabulary."""

import asyncio
import json
from pathlib import Path
from typing import Any

from ratchet.activities.contracts import names
from ratchet.activities.envs.rendering import renderer_of
from ratchet.activities.runtime.context import WorkerContext
from ratchet.activities.runtime.failing import final
from ratchet.activities.scoring import filters
from ratchet.activities.scoring.algorithms import Render
from ratchet.activities.scoring.algorithms.rendering import load_renderer
from ratchet.activities.storage import keys


class Policies:
    """Those of all runs, each read once from version 0."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._tokenizers: dict[str, str] = {}
        self._renderers: dict[str, dict[str, Any]] = {}
        self._vocab_sizes: dict[str, int] = {}

    def _fetch(self, run_id: str) -> Path:
        ref = self._ctx.store.require(keys.weights(run_id, 0))
        return self._ctx.store.fetch_folder(ref, self._ctx.scratch("weights"))

    def load_render(self, run_id: str) -> Render:
        """A function that renders the policy's prompts for algorithms; blocks while the tokenizer
        is fetched and loaded.
        """
        folder = self._fetch(run_id)
        return load_renderer(str(folder), renderer_of(self._ctx.config(run_id).model, folder))

    async def tokenizer(self, run_id: str) -> str:
        """A local folder with the run's tokenizer."""
        if run_id not in self._tokenizers:
            self._tokenizers[run_id] = str(await asyncio.to_thread(self._fetch, run_id))
        return self._tokenizers[run_id]

    async def renderer(self, run_id: str) -> dict[str, Any]:
        """The renderers config of the run."""
        if run_id not in self._renderers:
            folder, model = Path(await self.tokenizer(run_id)), self._ctx.config(run_id).model
            self._renderers[run_id] = await asyncio.to_thread(renderer_of, model, folder)
        return self._renderers[run_id]

    async def vocab_size(self, run_id: str) -> int:
        """Size of the policy's vocabulary, from its model config."""
        if run_id not in self._vocab_sizes:
            about = Path(await self.tokenizer(run_id)) / keys.MODEL_CONFIG
            size = filters.vocab_size_of(json.loads(about.read_text()))
            if size is None:
                raise final(
                    names.BAD_INPUT,
                    "the policy's config.json has no vocab_size, which the gibberish filter "
                    "needs; set filters.pre_batch and filters.post_batch without it",
                )
            self._vocab_sizes[run_id] = size
        return self._vocab_sizes[run_id]
