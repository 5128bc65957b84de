"""Which flags of vLLM `inference.extra_args` may hold. Pure.

Flags that Ratchet sets itself are refused everywhere, in every spelling that vLLM's parser accepts:
a second value would silently replace the first. Where an API has keys, only flags that change how
fast an engine is are allowed, and those that its operator lists: others import code, read files or
open ports.

Spellings of vLLM 0.32: `--flag value`, `--flag=value`, `--flag_name`, `--flag.key value`, a short
form, any beginning of a flag that no other one shares, `--no-flag`, a line of a `--config` file,
and a word that follows no flag, which names the model.
"""

import re
from collections.abc import Collection, Iterator, Sequence

OWN = {
    "--config": "the flags themselves",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--model": "model.name",
    "--served-model-name": "",
    "--load-format": "",
    "--seed": "seed",
    "--dtype": "inference.dtype",
    "--max-model-len": "trainer.seq_len",
    "--max-num-seqs": "inference.max_num_seqs",
    "--enable-scale-out": "",
    "--enable-prefix-caching": "",
    "--logprobs-mode": "",
    "--generation-config": "",
    "--disable-uvicorn-access-log": "",
    "--worker-extension-cls": "",
    "--kv-cache-memory-bytes": "inference.kv_cache_gib",
    "--gpu-memory-utilization": "inference.gpu_memory_utilization",
    "--device-memory-utilization": "inference.gpu_memory_utilization",
}
"""Flags that Ratchet sets, and the config key for each; '': there is none."""

_SPELLED = {form: name for name in OWN for form in (name, f"--no-{name[2:]}")}

SHARED = ("--enforce-eager",)
"""Flags that Ratchet sets on CPUs only."""

SHORT = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-O": "--optimization-level",
}

SWITCHES = (
    *SHARED,
    "--aggregate-engine-logging",
    "--async-scheduling",
    "--disable-cascade-attn",
    "--disable-chunked-mm-input",
    "--disable-custom-all-reduce",
    "--disable-hybrid-kv-cache-manager",
    "--disable-log-stats",
    "--disable-sliding-window",
    "--enable-chunked-prefill",
    "--enable-dbo",
    "--enable-eplb",
    "--enable-expert-parallel",
    "--enable-flashinfer-autotune",
    "--enable-mfu-metrics",
    "--kv-cache-metrics",
    "--language-model-only",
    "--numa-bind",
    "--scheduler-reserve-full-isl",
    "--skip-mm-profiling",
    "--use-fp64-gumbel",
)
"""Flags without a value that every API allows, also as `--no-…`."""

OPTIONS = (
    "--all2all-backend",
    "--attention-backend",
    "--block-size",
    "--cpu-offload-gb",
    "--cudagraph-capture-sizes",
    "--dbo-decode-token-threshold",
    "--dbo-prefill-token-threshold",
    "--decode-context-parallel-size",
    "--expert-placement-strategy",
    "--kv-cache-dtype",
    "--linear-backend",
    "--long-prefill-token-threshold",
    "--mamba-block-size",
    "--mamba-cache-dtype",
    "--mamba-ssm-cache-dtype",
    "--max-cudagraph-capture-size",
    "--max-logprobs",
    "--max-num-active-seqs",
    "--max-num-batched-tokens",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--max-num-scheduled-tokens",
    "--max-parallel-loading-workers",
    "--moe-backend",
    "--num-gpu-blocks-override",
    "--optimization-level",
    "--performance-mode",
    "--pipeline-parallel-size",
    "--prefill-schedule-interval",
    "--prefix-caching-hash-algo",
    "--quantization",
    "--renderer-num-workers",
    "--safetensors-load-strategy",
    "--scheduling-policy",
    "--stream-interval",
    "--tensor-parallel-size",
    "--watermark",
)
"""Flags with values that every API allows."""

ALLOWED = frozenset((*SWITCHES, *OPTIONS))


def is_flag(argument: str) -> bool:
    """Whether vLLM reads `argument` as a flag; a negative number is a value."""
    return argument.startswith("-") and re.fullmatch(r"-\d+|-\d*\.\d+", argument) is None


def flag_of(argument: str) -> str:
    """The long form of the flag that `argument` begins with, dashes for underscores."""
    name = re.split(r"[=.]", argument, maxsplit=1)[0]
    if name.startswith("--"):
        return "--" + name[2:].replace("_", "-")
    # -O3 is --optimization-level 3.
    return SHORT["-O"] if name.startswith("-O") else SHORT.get(name, name)


def own(flag: str) -> str | None:
    """The flag of Ratchet that `flag` (from `flag_of`) sets or abbreviates, if any."""
    if not flag.startswith("--"):
        return None
    return _SPELLED.get(flag) or next(
        (name for form, name in _SPELLED.items() if form.startswith(flag)), None
    )


def own_flags(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Index and reason of every argument that sets what Ratchet sets itself."""
    before = ""
    for place, argument in enumerate(arguments):
        if not is_flag(argument):
            if _takes_none(before):
                yield place, "follows no flag, so vLLM takes it for the model; remove it"
            continue
        before = argument
        if argument == "--":
            yield place, "ends the flags, so vLLM takes what follows for the model; remove it"
        elif (name := own(flag_of(argument))) is not None:
            key = OWN[name]
            remedy = f"set {key} instead" if key else "no config key changes it; remove it"
            yield place, f"sets {name}, which Ratchet sets itself; {remedy}"


def _takes_none(flag: str) -> bool:
    """Whether a word after `flag` is not its value; '' stands for no flag at all."""
    switch = flag_of(flag).replace("--no-", "--", 1) in SWITCHES
    return switch or "=" in flag or flag in ("", "--")


def admitted(argument: str, listed: Collection[str]) -> bool:
    """Whether an API with keys allows `argument`, given the flags that its operator lists."""
    if not is_flag(argument):
        return True
    flag = flag_of(argument)
    switch = flag.replace("--no-", "--", 1)
    # `--flag.key` sets part of the JSON value of a flag.
    return flag in ALLOWED or switch in SWITCHES or flag in {flag_of(entry) for entry in listed}
