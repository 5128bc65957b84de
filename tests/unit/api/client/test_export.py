"""A model that is written to a folder, by the client and by `ratchet runs export`."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.activities.storage import keys
from ratchet.activities.storage.store import ArtifactStore
from ratchet.api.client import NotExported, Ratchet, Refused, Unreachable, exports
from ratchet.api.client.exports import write_model
from ratchet.api.schemas.artifacts import Model
from tests.unit.api.client.support import breaking, on_server
from tests.unit.api.client.test_cli import Done, ratchet
from tests.unit.api.conftest import listening
from tests.unit.api.leaving import BIG, MODEL, app_of, leave, put_adapter, put_eval, weights_of

RUN = "reverse-1a2b3c"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    made = ArtifactStore(f"file://{tmp_path}/store")
    leave(made, RUN, weights=[0, 2, 3], checkpoints=[2])
    put_eval(made, RUN, "reverse-text", 3, 0.75)
    put_eval(made, RUN, "guess-hard", 2, 0.5)
    return made


async def exported(
    store: ArtifactStore, *arguments: str, wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app
) -> Done:
    async with listening(wrap(app_of(store))) as http:
        address = str(http.base_url).rstrip("/")
        return await ratchet(address, "runs", "export", *arguments)


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@on_server
async def test_a_folder_holds_the_model_and_its_card(store: ArtifactStore, tmp_path: Path) -> None:
    to = tmp_path / "models" / "mine"
    done = await exported(store, RUN, "--to", str(to))
    assert done.status == 0, done.err
    assert f"step 2 of {RUN}, the last checkpoint" in done.err
    assert f"{to} holds 5 files, 3.0 MiB" in done.out.replace("\n", "")
    assert names_in(to.parent) == [
        "mine",
        *(f"mine/{name}" for name in sorted([*MODEL, "README.md"])),
    ]
    assert (to / "model.safetensors").read_bytes() == weights_of(RUN, 2)
    assert f"# {RUN}, step 2" in (to / "README.md").read_text()


@on_server
async def test_a_version_is_chosen_by_step_or_eval(store: ArtifactStore, tmp_path: Path) -> None:
    chosen: list[tuple[list[str], int, str]] = [
        (["--step", "0"], 0, "step 0"),
        (["--best"], 3, "the best of reverse-text: 0.75"),
        (["--best", "guess-hard"], 2, "the best of guess-hard: 0.5"),
        (["--best=guess-hard"], 2, "the best of guess-hard: 0.5"),
    ]
    for number, (options, step, said) in enumerate(chosen):
        to = tmp_path / str(number)
        for order in ([*options, "--to", str(to)], ["--to", f"{to}-last", *options]):
            done = await exported(store, RUN, *order)
            assert done.status == 0 and said in done.err, done.err
            assert (Path(order[order.index("--to") + 1]) / "model.safetensors").read_bytes() == (
                weights_of(RUN, step)
            )
    as_json = await exported(store, RUN, "--best", "--json", "--to", str(tmp_path / "j"))
    assert (as_json.json["step"], as_json.json["to"]) == (3, str(tmp_path / "j"))


@on_server
async def test_what_cannot_be_had_is_said_and_leaves_nothing(
    store: ArtifactStore, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    to = ["--to", str(folder / "mine")]
    for options, status, said in (
        (["nope-run"], 1, "`ratchet runs list` shows all runs"),
        ([RUN, "--step", "9"], 1, "kept versions: 0, 2, 3"),
        ([RUN, "--step", "1"], 1, "retention.weights = 4"),
        ([RUN, "--best", "guess"], 1, "its evals are reverse-text, guess-hard"),
        ([RUN, "--best", "--step", "2"], 2, "--step and --best both choose a version"),
    ):
        done = await exported(store, *options, *to)
        assert done.status == status and said in " ".join(done.err.split()), done.err
    assert names_in(folder) == []


@on_server
async def test_what_exists_is_never_overwritten(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = names_in(tmp_path)
    for name in ("empty", "file", "link"):
        done = await exported(store, RUN, "--to", str(tmp_path / name))
        assert done.status == 1 and "is not overwritten" in " ".join(done.err.split())
    done = await exported(store, RUN, "--to", str(tmp_path / "file"), "--json")
    assert json.loads(done.err)["type"] == "urn:ratchet:problem:not-exported"
    assert names_in(tmp_path) == before and (tmp_path / "file").read_text() == "mine"


@on_server
async def test_a_connection_that_breaks_begins_the_file_again(
    store: ArtifactStore, tmp_path: Path
) -> None:
    to, result = tmp_path / "mine", list[int]()
    async with listening(app_of(store)) as http:
        cuts = [2**60, 2**60, 2**60, BIG // 2, BIG // 3]
        async with breaking(str(http.base_url).rstrip("/"), *cuts) as way:
            # Each request on a connection of its own, so that cuts meet them in turn.
            with Ratchet(way.address, max_retries=2) as client:
                client.runs._transport._http.headers["connection"] = "close"
                await asyncio.to_thread(client.runs.export_model, RUN, to, on_bytes=result.append)
    assert way.broken == 2
    assert (to / "model.safetensors").read_bytes() == weights_of(RUN, 2)
    assert max(result) == result[-1], "the last report is of everything"


@on_server
async def test_what_ends_early_leaves_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    async with listening(app_of(store)) as http:
        cuts = [2**60, 2**60, 2**60, BIG // 2]
        async with breaking(str(http.base_url).rstrip("/"), *cuts) as way:
            with Ratchet(way.address, max_retries=0) as client, pytest.raises(Unreachable):
                client.runs._transport._http.headers["connection"] = "close"
                await asyncio.to_thread(client.runs.export_model, RUN, tmp_path / "out" / "mine")
    assert names_in(tmp_path / "out") == []


@on_server
async def test_a_version_removed_on_the_way_is_said(store: ArtifactStore, tmp_path: Path) -> None:
    def remove(app: ASGIApp) -> ASGIApp:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("path", "").endswith("/model.safetensors"):
                await asyncio.to_thread(store.delete, store.require(keys.weights(RUN, 2)))
                await asyncio.to_thread(store.delete, store.require(keys.checkpoint(RUN, 2)))
            await app(scope, receive, send)

        return wrapped

    to = tmp_path / "out" / "mine"
    done = await exported(store, RUN, "--to", str(to), wrap=remove)
    assert done.status == 1 and "version 2 of run" in done.err and "removed" in done.err
    assert names_in(to.parent) == []


@on_server
async def test_bytes_that_differ_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.require(keys.weights(RUN, 2))
    store.fs.pipe_file(store.path(f"{ref.path}/model.safetensors"), b"x" * BIG)
    to = tmp_path / "out" / "mine"
    done = await exported(store, RUN, "--to", str(to))
    assert done.status == 1 and "differs from the file of version 2" in done.err
    assert names_in(to.parent) == []


def model(name: str, size: int = 1) -> Model:
    about: dict[str, Any] = {
        "run_id": RUN,
        "step": 1,
        "chosen": "step",
        "evals": {},
        "attempt": RUN,
        "kept_as": "weights",
        "path": "p",
        "size": size,
        "files": [{"name": name, "size": size, "sha256": "0" * 64}],
        "steps": [1],
        "card": "",
    }
    return Model.model_validate(about)


def fetch(name: str, file: Path, progress: Callable[[int], None]) -> str:
    file.write_text(name)
    return "0" * 64


def write(made: Model, to: Path) -> None:
    write_model(made, to, fetch, lambda done: None)


def test_files_stay_in_the_folder_and_may_lie_deeper(tmp_path: Path) -> None:
    for name in ("../outside", "/etc/outside", "a/../../outside"):
        with pytest.raises(NotExported, match="outside the folder"):
            write(model(name), tmp_path / "out" / "mine")
    assert names_in(tmp_path) == ["out"]
    write(model("additional_chat_templates/tools.jinja"), tmp_path / "out" / "mine")
    assert (tmp_path / "out" / "mine" / "additional_chat_templates" / "tools.jinja").is_file()


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    to = tmp_path / "mine"

    def slow(name: str, file: Path, progress: Callable[[int], None]) -> str:
        to.mkdir()
        return fetch(name, file, progress)

    with pytest.raises(NotExported, match="is not overwritten"):
        write_model(model("m"), to, slow, lambda done: None)
    assert names_in(tmp_path) == ["mine"]


def test_a_disk_that_is_too_small_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(NotExported, match="MiB free: free some space there"):
        write(model("m", 2**60), tmp_path / "mine")
    assert names_in(tmp_path) == []


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotExported, match="cannot be written"):
        write(model("m"), tmp_path / "file" / "mine")


@on_server
async def test_the_client_raises_what_the_api_refuses(store: ArtifactStore, tmp_path: Path) -> None:
    def ask(address: str) -> None:
        with Ratchet(address) as client:
            assert client.runs.model(RUN, best="guess-hard").step == 2
            with pytest.raises(Refused) as refused:
                client.runs.export_model(RUN, tmp_path / "mine", step=7)
            assert refused.value.status == 404

    async with listening(app_of(store)) as http:
        await asyncio.to_thread(ask, str(http.base_url))


MERGER = """
import sys
from pathlib import Path
base, adapter, out = map(Path, sys.argv[1:])
assert not (base / "README.md").exists()
out.mkdir()
parts = [base / "model.safetensors", adapter / "adapter_model.safetensors"]
(out / "model.safetensors").write_bytes(b"+".join(part.read_bytes() for part in parts))
"""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A run that keeps adapters alone, and a merger that puts bytes together."""
    made = ArtifactStore(f"file://{tmp_path}/alone")
    leave(made, RUN, weights=[0], steps=3, trainer={"lora": {"rank": 8}})
    put_adapter(made, RUN, 3)
    made.delete(made.require(keys.weights(RUN, 3)))
    (tmp_path / "mergers").mkdir()
    (tmp_path / "mergers" / "merges.py").write_text(MERGER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mergers"))
    monkeypatch.setattr(exports, "MERGER", "merges")
    return made


def export_merged(address: str, to: Path, told: list[int]) -> Model:
    with Ratchet(address) as client:
        return client.runs.export_model(RUN, to, merge=True, on_bytes=told.append)


@on_server
async def test_an_adapter_alone_is_merged_into_version_0(
    alone: ArtifactStore, tmp_path: Path
) -> None:
    to, told = tmp_path / "out" / "mine", list[int]()
    async with listening(app_of(alone)) as http:
        address = str(http.base_url).rstrip("/")
        model = await asyncio.to_thread(export_merged, address, to, told)
    assert names_in(to.parent) == ["mine", "mine/README.md", "mine/model.safetensors"]
    adapter = f"{keys.ADAPTER_WEIGHTS} of {RUN} 3".encode()
    assert (to / "model.safetensors").read_bytes() == weights_of(RUN, 0) + b"+" + adapter
    card = (to / "README.md").read_text()
    assert "with a LoRA adapter (rank 8, alpha 32) merged" in card and "library_name: peft" not in (
        card
    )
    assert (model.kind, model.step, model.card) == ("model", 3, card)
    assert [file.name for file in model.files] == ["model.safetensors"]
    assert told == sorted(told) and told[-1] > BIG


@on_server
async def test_a_merge_that_fails_says_why_and_leaves_nothing(
    alone: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "mergers" / "merges.py").write_text("raise SystemExit('no such layer')")
    async with listening(app_of(alone)) as http:
        address = str(http.base_url).rstrip("/")
        with pytest.raises(NotExported, match="no such layer; export the two"):
            await asyncio.to_thread(export_merged, address, tmp_path / "out" / "mine", [])
        monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(NotExported, match=r"requires torch and peft: pip install 'ratchet-rl"):
            await asyncio.to_thread(export_merged, address, tmp_path / "out" / "mine", [])
    assert names_in(tmp_path / "out") == []


@on_server
async def test_what_is_no_adapter_is_refused_as_before(
    alone: ArtifactStore, tmp_path: Path
) -> None:
    to = ["--to", str(tmp_path / "mine"), "--merge"]
    done = await exported(alone, RUN, "--step", "9", *to)
    assert done.status == 1 and "kept versions: 0, 3" in " ".join(done.err.split()), done.err
