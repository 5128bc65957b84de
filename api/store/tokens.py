"""Token ids as text, for people to read, from the `tokenizer.json` beside a run's weights.

Ids are only looked up, text is never encoded: nothing is trained on or sampled from this text.
Pieces of a character that spans tokens show as U+FFFD.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

from cachetools import LRUCache, cachedmethod
from pydantic import BaseModel

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore, CorruptArtifact

KEPT = 4
BYTE_LEVEL = "ByteLevel"


def _bytes_by_character() -> dict[str, int]:
    """How byte-level tokenizers write bytes as printable characters (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + place): byte for place, byte in enumerate(rest)}


_BYTES = _bytes_by_character()


class _Part(BaseModel):
    """A decoder or pre-tokenizer, or a sequence of them."""

    type: str = ""
    decoders: "list[_Part]" = []
    pretokenizers: "list[_Part]" = []

    @property
    def kinds(self) -> set[str]:
        """Its type, and the types of its parts."""
        return {self.type}.union(*(part.kinds for part in self.decoders + self.pretokenizers))


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Ids by piece; or pieces with their scores, by id."""


class _Added(BaseModel):
    id: int
    content: str


class _Tokenizer(BaseModel):
    """The parts of a `tokenizer.json` that are read."""

    model: _Vocabulary
    decoder: _Part | None = None
    pre_tokenizer: _Part | None = None
    added_tokens: list[_Added] | None = None


def pieces_by_id(file: Any) -> dict[int, str]:
    """Every token of a `tokenizer.json` as text; raises ValueError for an invalid file."""
    tokenizer = _Tokenizer.model_validate(file)
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):
        pieces = {number: piece for number, (piece, _) in enumerate(vocab)}
    else:
        pieces = {number: piece for piece, number in vocab.items()}
    parts = (tokenizer.decoder or _Part(), tokenizer.pre_tokenizer or _Part())
    kinds = set().union(*(part.kinds for part in parts))
    if BYTE_LEVEL in kinds:
        pieces = {
            number: bytes(_BYTES[c] for c in piece).decode(errors="replace")
            if all(c in _BYTES for c in piece)
            else piece
            for number, piece in pieces.items()
        }
    else:
        pieces = {number: piece.replace("▁", " ") for number, piece in pieces.items()}
    return pieces | {token.id: token.content for token in tokenizer.added_tokens or []}


class Tokenizers:
    """Vocabularies that were used lately."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._kept: LRUCache[str, dict[int, str] | None] = LRUCache(KEPT)
        self._read = threading.Condition()

    def texts(self, attempt: str, ids: Sequence[int]) -> list[str] | None:
        """The tokens [T] as text; None if the attempt keeps no readable tokenizer. Blocks."""
        pieces = self._pieces(attempt)
        return None if pieces is None else [pieces.get(number, "�") for number in ids]

    @cachedmethod(
        lambda self: self._kept, lambda _, attempt: attempt, condition=lambda self: self._read
    )
    def _pieces(self, attempt: str) -> dict[int, str] | None:
        folder = keys.weights(attempt, 0).rpartition("/")[0]
        for key in reversed(self._store.committed_keys(folder)):
            try:
                ref = self._store.require(key)
                return pieces_by_id(json.loads(self._store.read_file(ref, "tokenizer.json")))
            except (FileNotFoundError, CorruptArtifact, ValueError):
                continue
        return None
