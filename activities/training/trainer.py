"""The trainer's state (policy, optimizer and step) and its operations: load, train, save.

Invariants:

- State is a function of the checkpoint or version 0, the batches since with the config revision of
  each, and the number of threads; on a GPU in deterministic mode only. So a step after save and
  load has the same bits as without them.
- `step` advances only after the optimizer's step. A step that fails before leaves the state
  unchanged. Repeating the current step with the same batch and revision trains nothing and returns
  the same numbers, also after its files could not be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.activities.contracts.upgrades import TRAINER_STATE
from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.fingerprints import Fingerprints
from ratchet.activities.storage.batch import Sample, decode_batch
from ratchet.activities.storage.keys import (
    ADAPTER_FOLDER,
    CANARY_FILE,
    OPTIMIZER_FILE,
    OPTIMIZER_FOLDER,
    TRAINER_FILE,
)
from ratchet.activities.storage.token_logprobs import encode_token_logprobs
from ratchet.activities.training import (
    adapters,
    attention,
    determinism,
    recomputing,
    rl_loss,
    shards,
)
from ratchet.activities.training.batching import MicroBatch, member_counts, micro_batches
from ratchet.activities.training.client import NonFinite, StateMismatch
from ratchet.activities.training.flops import model_flops, peak
from ratchet.activities.training.loss import LossInputs, MemberCounts, total_loss
from ratchet.activities.training.memory import Shape
from ratchet.activities.training.model import (
    computing,
    export,
    load_model,
    score_batch,
)
from ratchet.activities.training.optimizers import Optimizer
from ratchet.activities.training.packing import TOKENS, model_cost
from ratchet.activities.training.ranks import ALONE, Ranks, sharded, whole
from ratchet.activities.training.schedules import learning_rate
from ratchet.activities.training.totals import Totals
from ratchet.configs.run import RunConfig
from ratchet.configs.upgrades import read_config
from ratchet.configs.versions import SCHEMA

if TYPE_CHECKING:
    import torch

    from ratchet.activities.training.head import Head

SINCE_LOAD: Any = {
    "model": True,
    "seed": True,
    "inference": {"dtype", "transfer"},
    "trainer": {
        "ranks": True,
        "compute_dtype": True,
        "matmul_precision": True,
        "packing": True,
        "activation_checkpointing": True,
        "offload_optimizer": True,
        "threads": True,
        "deterministic": True,
        "lora": True,
        "optim": {"type", "betas", "momentum", "nesterov", "ns_steps", "weight_decay"},
    },
}
"""Keys of a config that `load` builds into the state, so that they cannot change until the next."""

log = logging.getLogger(__name__)


def _peak_memory_gib(device: str) -> float:
    """The most memory that tensors (cuda) or this process (cpu) have taken so far, in GiB."""
    import torch

    if device == "cuda":
        return float(torch.cuda.max_memory_allocated() / 2**30)
    # The maximum that getrusage knows is inherited from the process that started this one.
    about = Path("/proc/self/status").read_text()
    return int(about.partition("VmHWM:")[2].split(maxsplit=1)[0]) / 2**20


class Trainer:
    """Trains one policy, alone or as one of several ranks, all of which get the same calls. Not
    thread-safe: one call at a time, always from the same thread.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._ranks: Ranks = ALONE
        self._model: Any = None
        self._scorer: Any = None
        self._adapter: Any = None
        self._base: str | None = None
        self._base_prints: Fingerprints | None = None
        self._tokenizer: Any = None
        self._optimizer: Optimizer | None = None
        self._rl_loss: rl_loss.RlLoss | None = None
        self._packing = False
        self._cost = TOKENS
        self._peak: float | None = None
        self._shape: Shape | None = None
        self._head: Head | None = None
        self._config: RunConfig | None = None
        self._input: dict[str, Any] = {}
        self._device = "cpu"
        self._batch_sha = ""
        self._revision = 0
        self._metrics: dict[str, float] = {}
        self._token_logprobs: bytes | None = None

    def prepare(self, deterministic: bool) -> None:
        """Imports the libraries, enters deterministic mode if that is set, and joins the other
        ranks, if there are any.
        """
        if deterministic:
            determinism.enable()
        import torch  # noqa: F401
        import transformers  # noqa: F401

        self._ranks = Ranks.join()

    def load(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        checkpoint: bool,
        base: Path | None = None,
    ) -> dict[str, Any]:
        """Loads the state of a checkpoint folder, or weights at step 0.

        `config` is the run's config as a document; `base` holds version 0, which the checkpoint of
        an adapter needs. Returns the fields of `client.Loaded`. Raises NewerSchema for a checkpoint
        of a newer build, ValueError for one that does not match the config.
        """
        import torch
        from transformers import AutoTokenizer

        from ratchet.activities.training.head import split

        self.step = None
        run = read_config(config)
        if run.trainer.deterministic:
            assert determinism.enabled(), "the process must be started with --deterministic"
        assert run.trainer.ranks == self._ranks.count, "one process must be started for each rank"
        if run.trainer.threads is not None:
            torch.set_num_threads(run.trainer.threads)
        state = self._read_state(folder, run, base) if checkpoint else None
        torch.manual_seed(run.seed)
        self._config, self._input = run, config
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_float32_matmul_precision(run.trainer.matmul_precision)
        source = folder if base is None else base
        self._model = load_model(source).to(self._device)
        for parameter in self._model.parameters() if self._ranks.count == 1 else ():
            # A copy: the loaded tensor may map a file that retention will delete. Several ranks
            # copy their rows anyway.
            parameter.data = parameter.data.clone()
        self._adapter = self._base = self._base_prints = None
        if run.trainer.lora is not None:
            torch.manual_seed(run.seed)
            self._adapter = adapters.adapt(self._model, run.trainer.lora, run.model)
            self._base, self._base_prints = adapters.identity(source), fingerprints.read(source)
            if checkpoint:
                adapters.read(self._adapter, folder / ADAPTER_FOLDER)
        self._tokenizer = AutoTokenizer.from_pretrained(source)
        self._rl_loss = rl_loss.build(run.trainer.loss)
        self._packing = self._pack(run.trainer.packing)
        if run.trainer.activation_checkpointing:
            recomputing.enable(self._model)
        self._head = split(self._model)
        if self._head is None:
            log.warning(
                "all logits of a micro-batch are held at once, since the model scales or caps "
                "them, or its head is adapted or trained whole with an adapter"
            )
        self._shape = Shape.read(self._model.config.to_dict())
        self._peak = None
        if self._device == "cuda":
            self._peak = peak(torch.cuda.get_device_name())
        self._scorer = None
        if self._ranks.count > 1:
            shards.require_plain(self._model)
            self._cost = model_cost(self._model.config.get_text_config())
            self._scorer = sharded(self._model, self._head, self._ranks)
        self._optimizer = Optimizer(
            self._model, run.trainer.optim, offload=run.trainer.offload_optimizer
        )
        self._batch_sha, self._revision, self._metrics = "", 0, {}
        self._token_logprobs = None
        warnings: list[str] = []
        step = 0
        if state is not None:
            step, warnings = self._load_state(folder, state)
        self.step = step
        return {
            "step": step,
            "torch_threads": torch.get_num_threads(),
            "torch_version": torch.__version__,
            "device": self._device,
            "deterministic": determinism.enabled(),
            "warnings": warnings,
        }

    def train(
        self,
        step: int,
        batch: bytes,
        out: Path,
        *,
        config: dict[str, Any] | None = None,
        revision: int = 0,
        token_logprobs: Path | None = None,
    ) -> dict[str, float]:
        """Trains batch `step` and exports the weights to `out`; returns the step's metrics.

        Writes the tokens' log-probabilities before the step to the file `token_logprobs`, if one is
        named and they are known: a loaded checkpoint does not hold those of its step. `config` is
        revision `revision` of the run's config, by which the step is trained; None: the current
        one. Raises StateMismatch for any step but the next one, or the current one with the same
        batch and revision; NonFinite if loss or gradient are not finite; ValueError for a batch
        that cannot be trained, or a config that changes a key that is fixed since the load.
        """
        digest = hashlib.sha256(batch).hexdigest()
        repeat = (step, digest, revision) == (self.step, self._batch_sha, self._revision)
        if not repeat:
            if self.step is None or step != self.step + 1:
                raise StateMismatch(
                    f"cannot train step {step} (batch {digest[:8]}, config revision {revision}): "
                    f"the trainer is at step {self.step} (batch {self._batch_sha[:8]}, config "
                    f"revision {self._revision})"
                )
            if config is not None and config != self._input:
                self._reconfigure(config)
            self._optimize(step, batch)
            self._batch_sha, self._revision = digest, revision
            self._metrics["config_revision"] = float(revision)
        started = time.monotonic()
        if not (out / CANARY_FILE).exists():
            assert self._config is not None
            self._export(out, self._config.inference.dtype)
        self._metrics.setdefault("seconds_export", time.monotonic() - started)
        if token_logprobs is not None and self._token_logprobs is not None:
            token_logprobs.write_bytes(self._token_logprobs)
        return self._metrics

    def save(self, step: int, out: Path) -> dict[str, Any]:
        """Writes a checkpoint of `step` to `out`; raises StateMismatch at any other step."""
        import torch

        if self.step is None or step != self.step:
            raise StateMismatch(f"cannot save step {step}: the trainer is at step {self.step}")
        if self._adapter is None:
            self._export(out, "float32")
        else:
            adapters.write(self._adapter, out / ADAPTER_FOLDER, self._ranks)
        assert self._optimizer is not None and self._config is not None
        self._save_optimizer(self._optimizer, out)
        state = {
            SCHEMA: TRAINER_STATE.current,
            "step": step,
            "optimizer": self._config.trainer.optim.type,
            "scheduler_step": step,
            "ranks": self._ranks.count,
            "torch_threads": torch.get_num_threads(),
            "torch_version": torch.__version__,
            "batch_sha256": self._batch_sha,
            "config_revision": self._revision,
            "metrics": self._metrics,
            "lora": None if (lora := self._config.trainer.lora) is None else lora.model_dump(),
            "base": self._base,
        }
        self._ranks.at_first_do(lambda: (out / TRAINER_FILE).write_text(json.dumps(state)))
        return {"step": step}

    # -- private ----------------------------------------------------------------------------

    def _computing(self) -> torch.autocast:
        assert self._config is not None
        return computing(self._device, self._config.trainer.compute_dtype)

    def _export(self, out: Path, dtype: str) -> None:
        assert self._config is not None
        if self._adapter is not None and self._config.transfer == "adapter":
            assert self._base_prints is not None and self._ranks.count == 1
            with self._computing():
                handles = (self._model, self._adapter, self._tokenizer)
                adapters.export(*handles, out, self._base_prints, dtype)
            return
        if self._adapter is not None:
            adapters.write(self._adapter, out / ADAPTER_FOLDER, self._ranks)
        served, sharded = [self._config.inference.dtype], self._scorer is not None
        merged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._adapter is not None and sharded:
            merged = adapters.merged_rows(self._model, self._ranks)
        elif self._adapter is not None:
            merged = adapters.merged(self._model)
        with merged, self._computing():
            if sharded:
                model = (self._model, self._scorer)
                shards.export(*model, self._tokenizer, out, dtype, served=served, ranks=self._ranks)
            else:
                export(self._model, self._tokenizer, out, dtype, served=served)

    def _save_optimizer(self, optimizer: Optimizer, out: Path) -> None:
        import torch
        from safetensors.torch import save_file

        tensors = {"rng/cpu": torch.get_rng_state()}
        if self._device == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state()
        tensors |= optimizer.state()
        if self._ranks.count > 1:
            shards.save_state(tensors, out, self._ranks)
        else:
            save_file(tensors, out / OPTIMIZER_FILE)

    def _reconfigure(self, config: dict[str, Any]) -> None:
        """Applies another revision of the config; raises ValueError if that needs another load."""
        assert self._config is not None
        run = read_config(config)
        before, after = (c.model_dump(include=SINCE_LOAD) for c in (self._config, run))
        if before != after:
            raise ValueError(
                f"the config cannot change from {before} to {after} while a trainer holds its "
                "state; fork the run to continue with the new values"
            )
        if run.trainer.loss != self._config.trainer.loss:
            self._rl_loss = rl_loss.build(run.trainer.loss)
        self._config, self._input = run, config

    def _pack(self, wanted: bool | None) -> bool:
        """Whether the loaded model gets packed rows; raises ValueError if it must but cannot."""
        if wanted is False:
            return False
        reason = attention.enable(self._model)
        if reason is not None and wanted:
            raise ValueError(
                f"trainer.packing is true, and this model cannot be packed: {reason}; "
                "set trainer.packing to false"
            )
        if reason is not None:
            log.warning("sequences are padded, since this model cannot be packed: %s", reason)
        return reason is None

    @staticmethod
    def _read_state(folder: Path, run: RunConfig, base: Path | None) -> dict[str, Any]:
        """The checkpoint's document; raises ValueError if the config does not match it."""
        file = folder / TRAINER_FILE
        state = TRAINER_STATE.upgraded(json.loads(file.read_text()), str(file))
        kept, wanted = state["optimizer"], run.trainer.optim.type
        if kept != wanted:
            raise ValueError(
                f"the checkpoint of step {state['step']} holds the state of optimizer {kept!r}, "
                f"and trainer.optim.type is {wanted!r}; set it to {kept!r}"
            )
        lora = run.trainer.lora
        held, asked = state["lora"], None if lora is None else lora.model_dump()
        if held != asked:
            what = "all weights" if held is None else f"the adapter {held}"
            raise ValueError(
                f"the checkpoint of step {state['step']} holds {what}, and trainer.lora of the "
                f"config is {asked or 'not set'}; a run that begins with the model "
                f"'run:RUN@{state['step']}' may train other weights"
            )
        if lora is not None and base is None:
            raise ValueError(
                f"the checkpoint of step {state['step']} holds an adapter alone, which goes with "
                "the weights of version 0, and was loaded without them"
            )
        if base is not None and (found := adapters.identity(base)) != state["base"]:
            raise ValueError(
                f"the adapter of step {state['step']} belongs to base weights {state['base']}, and "
                f"version 0 of the run, in {base}, holds {found}: restore the version 0 that the "
                "adapter was trained on"
            )
        return state

    def _load_state(self, folder: Path, state: dict[str, Any]) -> tuple[int, list[str]]:
        import torch
        from safetensors.torch import load_file

        assert self._optimizer is not None
        if self._ranks.count > 1 or (folder / OPTIMIZER_FOLDER).exists():
            tensors = shards.load_state(folder, self._optimizer.like, self._ranks)
        else:
            tensors = load_file(folder / OPTIMIZER_FILE)
        torch.set_rng_state(tensors["rng/cpu"])
        if self._device == "cuda" and "rng/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng/cuda"])
        self._optimizer.restore(tensors)
        self._batch_sha, self._metrics = state["batch_sha256"], state["metrics"]
        self._revision = state["config_revision"]
        here = {"torch_threads": torch.get_num_threads(), "torch_version": torch.__version__}
        here["ranks"] = self._ranks.count
        warnings = [
            f"{key} was {state[key]} and is {value}: the next steps may differ in their last bits"
            for key, value in here.items()
            if state[key] != value
        ]
        for warning in warnings:
            log.warning("checkpoint of step %s: %s", state["step"], warning)
        return int(state["step"]), warnings

    def _optimize(self, step: int, data: bytes) -> None:
        import torch

        assert self._config is not None and self._optimizer is not None
        trainer = self._config.trainer
        started = time.monotonic()
        samples = decode_batch(data)
        counts = member_counts(samples, trainer.seq_len)
        self._optimizer.zero_grad()
        # Each rank has its own tokens, and so drops other inputs.
        seed = self._config.seed + step + self._ranks.rank * 2**32
        with adapters.dropping(self._model, trainer.lora, seed), self._recovering():
            totals = self._backward(samples, counts)
        metrics, max_norm = totals.metrics(counts), trainer.optim.max_norm
        norm = whole(
            torch.nn.utils.clip_grad_norm_(
                self._model.parameters(), float("inf") if max_norm is None else max_norm
            )
        ).item()
        if not torch.isfinite(torch.tensor([norm, metrics["loss"]])).all():
            raise NonFinite(
                f"step {step}: loss {metrics['loss']}, gradient norm {norm}; no weight changed. "
                "A smaller trainer.optim.lr is the usual remedy"
            )
        lr = learning_rate(trainer.scheduler, trainer.optim.lr, step - 1, self._config.last_step)
        reported = None
        if self._ranks.first:
            scores = [totals.scores[place] for place in range(len(samples))]
            reported = encode_token_logprobs(samples, scores)
        self._optimizer.step(lr)
        self.step = step
        self._token_logprobs = reported
        seconds = time.monotonic() - started
        tokens = sum(min(len(sample.token_ids), trainer.seq_len) for sample in samples)
        self._metrics = (
            metrics
            | self._utilization(totals, seconds)
            | {
                "grad_norm": norm,
                "lr": lr,
                "optim/grad_norm": norm,
                "optim/lr": lr,
                "perf/throughput": tokens / seconds,
                "perf/peak_memory": max(self._ranks.all(_peak_memory_gib(self._device))),
                "samples": float(len(samples)),
                "seconds_train": seconds,
            }
        )

    def _utilization(self, totals: Totals, seconds: float) -> dict[str, float]:
        """The share of the ranks' peak that the model's FLOPs are; none if either is unknown."""
        if self._peak is None or self._shape is None:
            return {}
        work = int(totals.sums["computed"]), int(totals.sums["squares"])
        flops = model_flops(self._shape, *work, frozen=self._adapter is not None)
        return {"perf/mfu": flops / seconds / (self._peak * self._ranks.count)}

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """Prepares a sharded model for another step if this one fails on all ranks."""
        try:
            yield
        except Exception:
            if self._scorer is not None:
                self._scorer.reset_iter_state()
            raise

    def _score(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scorer is None:
            return score_batch(self._model, batch, self._head)
        scores: tuple[torch.Tensor, torch.Tensor] = self._scorer(
            batch.token_ids, batch.temperature, batch.positions, batch.layout
        )
        return scores

    def _backward(self, samples: list[Sample], counts: MemberCounts) -> Totals:
        """Accumulates the step's gradient from this rank's micro-batches. Returns the totals over
        all ranks.
        """
        assert self._config is not None and self._rl_loss is not None
        trainer = self._config.trainer
        totals = Totals()
        for made in micro_batches(
            samples,
            trainer.seq_len,
            trainer.micro_batch_tokens,
            packing=self._packing,
            worker=self._ranks.rank,
            workers=self._ranks.count,
            cost=self._cost,
        ):
            batch = made.to(self._device)
            with self._computing():
                logprobs, entropy = self._score(batch)
            inputs = LossInputs(
                trainer_logprobs=logprobs,
                engine_logprobs=batch.logprobs,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                rl_weights=batch.rl_weights,
                ce_weights=batch.ce_weights,
                ref_kl_weights=batch.ref_kl_weights,
                ref_logprobs=batch.ref_logprobs,
            )
            share = total_loss(inputs, self._rl_loss(inputs, batch.spans()), counts)
            share.total.backward()  # type: ignore[no-untyped-call]
            totals.add(batch, samples, inputs, entropy, share)
        return totals.joined(self._ranks)
