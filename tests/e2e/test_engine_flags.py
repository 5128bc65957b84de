"""The table of engine flags against the parser of the installed vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.configs.engine_flags import OPTIONS, OWN, SHORT, SWITCHES

KNOWN = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps({flag: [action.nargs == 0, action.option_strings]
                  for action in actions for flag in action.option_strings}))
"""


@pytest.mark.nightly
def test_flags_of_the_table_are_those_of_the_engine(tmp_path: Path) -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-P", "-c", KNOWN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    known = json.loads(done.stdout.splitlines()[-1])
    # What sets one of ours by another name is ours, too.
    for name in OWN:
        if name != "--config" and name in known:
            longer = [form for form in known[name][1] if form.startswith("--")]
            assert all(form.replace("--no-", "--", 1) in OWN for form in longer), longer
    assert set(SWITCHES) <= {name for name, (bare, _) in known.items() if bare}
    assert set(OPTIONS) <= {name for name, (bare, _) in known.items() if not bare}
    assert set(OWN) <= set(known)
    for short, name in SHORT.items():
        assert short == "-O" or short in known[name][1]
    # No flag of its own is refused as the beginning of one of ours.
    assert not [n for n in known if n not in OWN and any(o.startswith(n) for o in OWN)]
