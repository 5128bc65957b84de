"""What of a config decides which data a run goes through."""

from typing import Any

from ratchet.configs.run import RunConfig


def data_of(config: RunConfig) -> dict[str, Any]:
    """What of a config decides which examples are drawn and what a finalized group holds."""
    data = config.model_dump(mode="json", include={"seed", "train", "algo", "filters", "eval"})
    return {
        **data,
        "train": {**data["train"], "env": [{**e, "ratio": 0} for e in data["train"]["env"]]},
        "eval": [env["name"] for env in data["eval"]["env"]],
    }
