"""Where environments are found and how a run's env section becomes a verifiers config.

Code of environments only ever runs in separate processes (env servers, `check`, `dump`), whose
import path is set up here and nowhere else. A worker never imports an environment.
"""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.activities.contracts.names import SHIPPED_ENVS
from ratchet.configs.reference import HIDDEN
from ratchet.configs.variables import variable_of

SHIPPED_DIR = Path(__file__).resolve().parent / "shipped"

HARNESS = "ratchet-chat"
INFINITE_EXAMPLES = 10_000
"""What counts as one epoch of a taskset without an end, if it yields that many in time."""


def process_env(env_path: str | None, scratch: Path) -> dict[str, str]:
    """Environment variables of a process that runs an environment's code.

    Its home is `scratch`, since verifiers leaves a folder per rollout below the home of a server
    that is killed. The Hugging Face cache stays where it was.
    """
    paths = [*([env_path] if env_path else []), str(SHIPPED_DIR)]
    inherited = os.environ.get("PYTHONPATH")
    hub = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return {
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "HOME": str(scratch),
        "XDG_CACHE_HOME": str(scratch / ".cache"),
        "HF_HOME": hub,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def known_ids(env_path: str | None) -> list[str]:
    """Ids that could have been meant: what ships, and the modules of the env's own folder."""
    ids = list(SHIPPED_ENVS)
    if env_path and Path(env_path).is_dir():
        for entry in sorted(Path(env_path).iterdir()):
            package = entry.is_dir() and (entry / "__init__.py").exists()
            if (package or entry.suffix == ".py") and not entry.stem.startswith("_"):
                ids.append(entry.stem.replace("_", "-"))
    return ids


def module_of(env_id: str) -> str:
    """The module that verifiers imports for an id: 'owner/my-env@2' is my_env."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def own_modules(env_id: str, env_path: str | None) -> list[str]:
    """The modules that are the environment's own: the one of its id, and all of its folder."""
    modules = {module_of(env_id)}
    if env_path and Path(env_path).is_dir():
        modules |= {entry.stem for entry in Path(env_path).iterdir() if entry.stem.isidentifier()}
    return sorted(modules)


def suggestion(env_id: str, env_path: str | None) -> str:
    """'did you mean …' for the nearest known id, else the list of known ids."""
    known = known_ids(env_path)
    near = difflib.get_close_matches(env_id.replace("_", "-"), known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return "known ids: " + ", ".join(repr(name) for name in known)


def with_variables(args: Any, secrets: list[str]) -> Any:
    """`args` with a variable of this process for every `{ env_var = "NAME" }`; their values are
    added to `secrets`. Raises ValueError that names a variable that is not set.
    """
    if (name := variable_of(args)) is not None:
        value = os.environ.get(name)
        if not value:
            raise ValueError(
                f"args use the environment variable {name}, which is not set on this worker; set "
                "it where rollout workers and env hosts are started"
            )
        secrets.append(value)
        return value
    if isinstance(args, dict):
        return {key: with_variables(item, secrets) for key, item in args.items()}
    if isinstance(args, list):
        return [with_variables(item, secrets) for item in args]
    return args


def without(secrets: Sequence[str], text: str) -> str:
    """`text` with all `secrets` removed."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


# The rest runs inside such a process: it imports verifiers and the environment.


def taskset_config(env_id: str, args: dict[str, Any], kind: str) -> dict[str, Any]:
    """Arguments of the taskset with its id; `split` is `kind` where it exists and is not set.

    `kind` is 'train' or 'eval'. Raises what importing the environment raises.
    """
    from verifiers.v1.utils.loaders import taskset_config_type

    fields = taskset_config_type(env_id).model_fields
    split = {"split": kind} if "split" in fields else {}
    return {**split, **args, "id": env_id}


def load_taskset(env_id: str, args: dict[str, Any], kind: str) -> Any:
    """The taskset, ready for iteration."""
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    config = taskset_config_type(env_id).model_validate(taskset_config(env_id, args, kind))
    return load_taskset(config)


def chats(env_id: str) -> bool:
    """Whether the policy chats about the tasks as they are: the taskset brings no own harness."""
    from verifiers.v1.utils.loaders import default_harness_id

    return bool(default_harness_id(env_id) == "bash")


def server_config(env_id: str, args: dict[str, Any], timeout_s: float) -> Any:
    """The env server's config: every seat chats in process, on the local machine.

    A taskset that brings its own harness keeps it. `timeout_s` bounds a seat's rollout, as a
    backstop for a client that is gone.
    """
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import env_config_type

    seat: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "timeout": {"rollout": timeout_s},
    }
    if chats(env_id):
        seat["harness"] = {"id": HARNESS}
    seats = [
        name
        for name, field in env_config_type(env_id).model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    ]
    data: dict[str, Any] = dict.fromkeys(seats, seat)
    data["taskset"] = taskset_config(env_id, args, "train")
    return vf.resolve_env_config(data)
