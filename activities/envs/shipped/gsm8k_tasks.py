"""gsm8k-tasks: word problems of grade-school mathematics (Cobbe et al., arXiv:2110.14168).

One turn. The reward is 1 if the last number of the reply is the answer, else 0; a reply that was
cut off earns nothing. Training draws from the train split, evals from the test split. The data are
two Parquet files of the hub's `openai/gsm8k`, at a fixed commit; files in the hub's cache are not
downloaded again.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from ratchet.configs.env import ALL

HUB = "openai/gsm8k"
REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"
FILES = {
    "train": "main/train-00000-of-00001.parquet",
    "eval": "main/test-00000-of-00001.parquet",
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARK = "####"
"""Precedes the answer in a worked solution of the data."""
SUFFIX = "\n\nReason step by step, and end with the answer as a number."


def number_in(text: str) -> Decimal | None:
    """The last number of a text, commas between its digits left out; None if it has none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _file(split: str) -> Path:
    """The data of a split; raises ValueError if it is unavailable."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        got = hf_hub_download(HUB, FILES[split], repo_type="dataset", revision=REVISION)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"the data of {HUB} are not in the cache ({constants.HF_HUB_CACHE}), and the hub "
            f"({constants.ENDPOINT}) does not provide them: {str(error).splitlines()[0]}"
        ) from error
    return Path(got)


class Gsm8kData(vf.TaskData):
    """One problem."""

    answer: str


class Gsm8kTask(vf.Task[Gsm8kData]):
    """Scores one reply."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the reply's last number is the answer."""
        return self.grade(trace)

    def grade(self, trace: vf.Trace) -> float:
        """1 for the right number, 0 for another, for none, and for a reply that was cut off."""
        if trace.is_truncated:
            return 0.0
        return float(number_in(trace.last_reply) == Decimal(self.data.answer))


class Gsm8kConfig(vf.TasksetConfig):
    """Which problems: the first `num_examples` of a split, or all of it."""

    split: Literal["train", "eval"] = "train"
    num_examples: int = Field(default=ALL, ge=ALL)
    suffix: str = SUFFIX


class Gsm8kTaskset(vf.Taskset[Gsm8kTask, Gsm8kConfig]):
    """The problems of a split, in the order of the data."""

    def load(self) -> Iterator[Gsm8kTask]:
        """Yields one task a problem; raises ValueError without the data."""
        import pyarrow.parquet as pq

        config = self.config
        table = pq.read_table(_file(config.split))
        wanted = None if config.num_examples == ALL else config.num_examples
        rows = table.select(["question", "answer"]).slice(0, wanted).to_pylist()
        for index, row in enumerate(rows):
            answer = number_in(row["answer"].rpartition(MARK)[2])
            if answer is None:
                raise ValueError(f"problem {index} of split {config.split!r} has no answer")
            data = Gsm8kData(
                id=f"{config.split}/{index}",
                prompt=row["question"] + config.suffix,
                answer=str(answer),
            )
            yield Gsm8kTask(data, config.task)


__all__ = ["Gsm8kTaskset"]
