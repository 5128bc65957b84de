#!/usr/bin/env bash
# Client, API, workflows and the rollout role on Python 3.13, with the versions that are locked for
# 3.11: they are installed, imported and tested. Engines and trainers are no part of it, since vLLM's
# CPU build is for 3.11 alone. One argument is the folder of the virtual environment.
# Where no 3.13 runs, root enters a Debian trixie that mmdebstrap makes.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${1:-.ratchet/python313}
PACKAGES=python3.13,python3.13-venv,ca-certificates,curl,git
if ! "${PYTHON:-python3.13}" -c "" 2>/dev/null; then
    [ -z "${PYTHON:-}" ] && [ "$(id -u)" = 0 ] || {
        echo "python313: ${PYTHON:-python3.13} does not run; say PYTHON=/path/to/python3.13, or run this as root without PYTHON on Debian or Ubuntu" >&2
        exit 1
    }
    command -v mmdebstrap >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends mmdebstrap >/dev/null; }
    TRIXIE=.ratchet/trixie
    if [ ! -e "$TRIXIE" ]; then
        mkdir -p .ratchet
        rm -rf "$TRIXIE.part"
        mmdebstrap --quiet --variant=minbase --include="$PACKAGES" trixie "$TRIXIE.part"
        mv "$TRIXIE.part" "$TRIXIE"
    fi
    # Its mounts are of a namespace of their own, which ends with it: this checkout, the kernel's
    # files, and what pip and uv need of this machine to reach packages.
    export VENV
    exec unshare --mount bash -euo pipefail -c '
        for place in "${@:2}"; do
            [ -e "$place" ] || continue
            inside=$1$place
            if [ -d "$place" ]; then mkdir -p "$inside"; else mkdir -p "${inside%/*}" && touch "$inside"; fi
            mount --rbind "$place" "$inside"
        done
        export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHON=python3.13
        exec chroot "$1" "$PWD/tests/nightly/python313.sh" "$VENV"
    ' - "$PWD/$TRIXIE" "$PWD" /proc /dev /sys /opt "$HOME/.config/pip" /etc/{pip.conf,xdg/pip,hosts,resolv.conf,ssl/certs} \
        /usr/{,local/}share/ca-certificates
fi

"${PYTHON:-python3.13}" -m venv "$VENV"
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
"$BIN/python" -m pytest -q -rs -p no:cacheprovider -n 2 --dist loadfile -m "not long and not nightly and not alone" \
    --ignore tests/unit/api/dashboard/test_pages.py --ignore tests/unit/api/dashboard/test_timeline.py \
    --deselect tests/unit/api/client/test_export.py::test_an_adapter_alone_is_merged_into_version_0 \
    --deselect tests/unit/api/client/test_export.py::test_a_merge_that_fails_says_why_and_leaves_nothing \
    tests/unit/{api,configs,workflows} tests/workflow/test_{preflight,sandbox,training_run}.py \
    tests/unit/activities/{envs,hosting,rollouts,storage} \
    tests/unit/activities/scoring/{algorithms/test_algorithms,test_filters,test_references,test_scoring,test_subsets}.py
