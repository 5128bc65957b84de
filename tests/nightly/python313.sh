#!/usr/bin/env bash
# Client, API, workflows and the rollout role on Python 3.13, with the versions that are locked for
# 3.11: they are installed, imported and tested. Engines and trainers are no part of it, since vLLM's
# CPU build is for 3.11 alone. One argument is the folder of the virtual environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3.13}
VENV=${1:-.ratchet/python313}
command -v "$PYTHON" >/dev/null || {
    echo "python313: $PYTHON is not on PATH; Debian trixie has it, or say PYTHON=/path/to/python3.13" >&2
    exit 1
}

"$PYTHON" -m venv "$VENV"
BIN=$(cd "$VENV/bin" && pwd)
"$BIN/pip" install -q "uv==$(sed -n 's/^UV_VERSION := //p' Makefile)"
"$BIN/uv" pip compile -q --python "$BIN/python" -c requirements/cpu.lock \
    --override requirements/override.txt --override requirements/source-only.txt \
    --override requirements/newer.txt pyproject.toml \
    --extra rollout --extra stack --extra reasoning-gym tests/nightly/python313.in \
    -o "$VENV/requirements.txt"
"$BIN/uv" pip install -q --python "$BIN/python" --no-deps -r "$VENV/requirements.txt"
"$BIN/uv" pip install -q --python "$BIN/python" --no-deps --no-build-isolation -e .

"$BIN/python" -P - <<'PROGRAM'
import importlib
import pkgutil
import platform

import ratchet

ROLLOUT = ("contracts", "storage", "runtime", "hosting", "envs", "scoring", "rollouts")
rooms = ["api", "configs", "workflows", *(f"activities.{room}" for room in ROLLOUT)]
count = 0
for room in rooms:
    top = importlib.import_module(f"ratchet.{room}")
    for module in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(f"{count} modules of {len(rooms)} rooms import on Python {platform.python_version()}")
PROGRAM

# What needs torch, an engine or a browser is left out, and so are the histories recorded on 3.11:
# 3.12 and later do not replay them (`ratchet.worker.versioning`).
"$BIN/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile -m "not long and not nightly and not alone" \
    --ignore tests/unit/api/dashboard/test_pages.py --ignore tests/unit/api/dashboard/test_timeline.py \
    --deselect tests/unit/api/client/test_export.py::test_an_adapter_alone_is_merged_into_version_0 \
    --deselect tests/unit/api/client/test_export.py::test_a_merge_that_fails_says_why_and_leaves_nothing \
    tests/unit/{api,configs,workflows} tests/workflow/test_{preflight,sandbox,training_run}.py \
    tests/unit/activities/{envs,hosting,rollouts,storage} \
    tests/unit/activities/scoring/test_{algorithms,filters,references,scoring,subsets}.py
