"""The files of a trainer of several ranks: weights as one model, moments in parts by rank.

Weights are in Hugging Face layout: whole tensors in safetensors files of about SHARD_BYTES with an
index, so that engines, exports and a trainer of any number of ranks can read them. Tensors are
gathered one at a time; the ranks take turns in writing files. Moments are written by torch's
distributed checkpoint: each rank writes its rows, and any number of ranks reads its rows from them,
or from the single file of a trainer of one process.

Invariant: the files are a function of the tensors and the number of ranks: they hold nothing random
and no path.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.activities.inference import fingerprints
from ratchet.activities.inference.fingerprints import Fingerprints
from ratchet.activities.storage.keys import CANARY_FILE, OPTIMIZER_FOLDER
from ratchet.activities.training import adapters
from ratchet.activities.training.model import canary_sequences, scored, write_canary
from ratchet.activities.training.ranks import Ranks, whole

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 2**30
"""Size of a file, which a rank holds while it writes it. A larger tensor gets its own file."""


def _split(shapes: Mapping[str, tuple[Sequence[int], Any]], most: int) -> Any:
    """Assigns tensors to files by shape and dtype."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    shown = {
        name: torch.empty(tuple(shape), dtype=dtype, device="meta")
        for name, (shape, dtype) in shapes.items()
    }
    return split_torch_state_dict_into_shards(
        shown, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )


def require_plain(model: Any) -> None:
    """Raises ValueError for a model that holds its weights in another layout than its files do."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    own = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
    }
    if {n: t.shape for n, t in revert_weight_conversion(model, dict(own)).items()} != {
        n: t.shape for n, t in own.items()
    }:
        raise ValueError(
            f"trainer.ranks is above 1, and {type(model).__name__} holds its weights in another "
            "layout than its files do, as mixtures of experts may; set trainer.ranks to 1"
        )


def write_weights(
    tensors: Mapping[str, Tensor],
    folder: Path,
    dtype: str,
    served: Sequence[str],
    ranks: Ranks,
) -> Fingerprints:
    """Gathers tensors and writes them in `dtype` to `folder`, in files of SHARD_BYTES.

    All ranks must call this. Returns the fingerprints in `dtype` and in those `served`, on the
    first rank only.
    """
    import torch
    from safetensors.torch import save_file

    def cast(tensor: Tensor) -> torch.dtype:
        wanted: torch.dtype = getattr(torch, dtype)
        return wanted if tensor.is_floating_point() else tensor.dtype

    split = _split({name: (t.shape, cast(t)) for name, t in tensors.items()}, SHARD_BYTES)
    failure: Exception | None = None

    def own() -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of this rank's files, and writes each file once it has its tensors."""
        nonlocal failure
        for place, (file, names) in enumerate(split.filename_to_tensors.items()):
            mine = place % ranks.count == ranks.rank
            held: dict[str, Tensor] = {}
            for name in names:
                full = whole(tensors[name].detach())
                if mine:
                    yield name, full
                    held[name] = full.to("cpu", cast(full)).contiguous()
            if mine and failure is None:
                try:
                    save_file(held, folder / file, metadata={"format": "pt"})
                except Exception as error:
                    # The other ranks continue to gather, so this one must as well.
                    failure = error

    taken = ranks.at_first(fingerprints.take(own(), dict.fromkeys([dtype, *served])))
    ranks.agree(failure)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        ranks.at_first_do(lambda: (folder / INDEX_FILE).write_text(text))
    shapes = {name: shape for part in taken for name, shape in part.shapes.items()}
    by_dtype = {
        kind: {name: value for part in taken for name, value in part.dtypes[kind].items()}
        for kind in dict.fromkeys([dtype, *served])
    }
    return Fingerprints(shapes, by_dtype)


def export(
    model: Any,
    scorer: Any,
    tokenizer: Any,
    folder: Path,
    dtype: str,
    *,
    served: Sequence[str],
    ranks: Ranks,
) -> None:
    """`model.export` for a model that is sharded over ranks, all of which must call this; `scorer`
    is the module that `ranks.sharded` returned.
    """
    import torch

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CANARY_FILE).unlink(missing_ok=True)

    ranks.at_first_do(begin)
    taken = write_weights(adapters.plain_state(model), folder, dtype, served, ranks)
    sequences = canary_sequences(model, tokenizer)
    ids = torch.tensor(sequences, device=model.device)
    with torch.no_grad():
        scores, _ = scorer(ids, torch.ones(1, 1, device=ids.device), by_blocks=False)
    scorer.reset_iter_state()

    def end() -> None:
        about = copy.deepcopy(model.config)
        about.dtype, about.architectures = dtype, [type(model).__name__]
        about.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        fingerprints.write(folder, taken)
        write_canary(folder, scored(sequences, scores[:, 1:]), {})

    ranks.at_first_do(end)


# -- the optimizer's state ----------------------------------------------------------------------


def save_state(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Writes to the checkpoint `folder`: each rank its rows of sharded tensors, and tensors that
    all ranks share once. All ranks must call this.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    split = _split({n: (t.shape, t.dtype) for n, t in tensors.items()}, SHARD_BYTES * ranks.count)
    files = {name: place for place, name in enumerate(split.filename_to_tensors, 1)}
    writer = HuggingFaceStorageWriter(
        str(folder / OPTIMIZER_FOLDER),
        {name: files[file] for name, file in split.tensor_to_filename.items()},
        save_distributed=True,
    )
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        # CheckpointException is no Exception; it is raised on every rank.
        raise _first_failure(error) from error

    def settle() -> None:
        for file in sorted((folder / OPTIMIZER_FOLDER).iterdir()):
            _sort_metadata(file)

    ranks.at_first_do(settle)


def _sort_metadata(file: Path) -> None:
    """Sorts the metadata of a safetensors file, whose order the library leaves to chance."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the same keys and values, in another order"
        opened.seek(8)
        opened.write(text.ljust(size))


def load_state(folder: Path, like: Any, ranks: Ranks) -> dict[str, Tensor]:
    """The tensors that `save_state`, or a trainer of one process, wrote to the checkpoint `folder`.
    `like` returns, for a name, size and dtype, the tensor to read into, sharded or not, or None to
    skip it. All ranks must call this.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    parts = folder / OPTIMIZER_FOLDER
    reader = HuggingFaceStorageReader(str(parts if parts.exists() else folder))
    held: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    wanted = {name: like(name, about.size, about.properties.dtype) for name, about in held.items()}
    tensors = {name: tensor for name, tensor in wanted.items() if tensor is not None}
    try:
        load(tensors, storage_reader=reader, no_dist=ranks.count == 1)
    except CheckpointException as error:
        raise _first_failure(error) from error
    return tensors


def _first_failure(error: Any) -> Exception:
    """The error of the first rank that failed."""
    failure: Exception = error.failures[min(error.failures)][0]
    return failure
