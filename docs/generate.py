"""Writes the pages of docs/reference from what they describe, and the dashboard's help page from
docs/reading-a-run.md: `python -m docs.generate`.

The config's schema, the command's own parser, the OpenAPI document and the declarations of metrics
say it all; the pages add nothing. With `--check` nothing is written, and a stale page is an error.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from typer.core import TyperGroup

from docs import help
from docs.step_metrics import SECTIONS
from ratchet.activities.contracts.names import Queues
from ratchet.api.app import create_app
from ratchet.api.client.cli import app as cli
from ratchet.api.routes.prometheus import Requests, away_gauge, machine_gauges, run_gauges
from ratchet.api.schemas.metrics import GaugeSample, GpuUsage, LoopLag, Usage
from ratchet.api.settings import Settings
from ratchet.configs.base import Section
from ratchet.configs.run import RunConfig

FOLDER = Path(__file__).parent / "reference"
MADE = "<!-- Written by `make reference`; change what it describes instead. -->"
Schema = Mapping[str, Any]


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 with `--check` if a page is stale."""
    stale = []
    made = {FOLDER / name: text for name, text in pages().items()}
    for file, text in {**made, help.PAGE: help.page()}.items():
        if not file.exists() or file.read_text() != text:
            stale.append(str(file.relative_to(FOLDER.parents[1])))
            if "--check" not in argv:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text)
    if stale and "--check" in argv:
        print(f"stale: {', '.join(stale)}; `make reference` writes them again", file=sys.stderr)
        return 1
    return 0


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    made = {"config.md": config(), "cli.md": command(), "rest.md": rest(), "metrics.md": metrics()}
    return {name: "\n".join([MADE, "", *lines]) + "\n" for name, lines in made.items()}


def prose(text: str) -> str:
    """A description as Markdown on one line: what stands outside of code is no markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts).replace("|", r"\|")


def code(text: str) -> str:
    """Code in a cell of a table, where Markdowns differ about a bar between backticks."""
    return f"<code>{escape(text)}</code>".replace("|", "&#124;") if "|" in text else f"`{text}`"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A table, and the empty line after it."""
    head = [*head]
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def anchor(title: str) -> str:
    """The link to a heading, as GitHub and Python-Markdown make it."""
    return "#" + re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


# -- config ---------------------------------------------------------------------------------------


def config() -> list[str]:
    """A section for each table of a config, in the order in which a config reaches them."""
    schema = RunConfig.model_json_schema()
    lines = [
        "# Config reference",
        "",
        "Every key of a run's config. A table that several others have is described once, where it "
        'comes first. `<none>` is null: `key = "<none>"` in TOML, `key=none` on the command line.',
        "",
    ]
    waiting = [Table("", "Top level", RunConfig, schema)]
    known: dict[str, Table] = {}
    while waiting:
        here = waiting.pop(0)
        below = []
        for key, it in here.schema.get("properties", {}).items():
            for name in _references(it):
                if name not in known:
                    known[name] = Table.of(f"{here.path}.{key}".lstrip("."), name, schema["$defs"])
                    below.append(known[name])
        waiting[:0] = below
        lines += [f"## {here.title}", "", *here.about, ""]
        required = here.schema.get("required", ())
        rows = [
            (
                code(key),
                _type(it, known),
                "**required**" if key in required else _default(here.model, key),
                prose(it.get("description") or " ".join(_about(it, known))),
            )
            for key, it in here.schema.get("properties", {}).items()
            if key != "type"
        ]
        lines += table(("key", "type", "default", "what it sets"), rows) if rows else []
    return lines


@dataclass(frozen=True)
class Table:
    """One table of a config: where it stands, its heading, its class and that one's schema."""

    path: str
    title: str
    model: type[BaseModel]
    schema: Schema

    @staticmethod
    def of(path: str, name: str, defs: Schema) -> "Table":
        """The table of a definition; one of several of a key has its type in the heading."""
        kind = defs[name]["properties"].get("type", {}).get("const")
        return Table(path, f"{path}: {kind}" if kind else path, _classes()[name], defs[name])

    @property
    def kind(self) -> str:
        """Its `type`; '' if it is the only one at its place."""
        return str(self.schema["properties"].get("type", {}).get("const", ""))

    @property
    def about(self) -> list[str]:
        """What stands below its heading."""
        chosen = f'`type = "{self.kind}"`. ' if self.kind else ""
        return [chosen + prose(self.schema.get("description", ""))]

    @property
    def link(self) -> str:
        """A link to it, by its type or its key."""
        return f"[{code(_toml(self.kind) if self.kind else self.path)}]({anchor(self.title)})"


def _classes() -> dict[str, type[BaseModel]]:
    """All sections by name."""
    result, waiting = {}, [Section]
    while waiting:
        cls = waiting.pop()
        result[cls.__name__] = cls
        waiting += cls.__subclasses__()
    return result


def _references(it: Schema) -> list[str]:
    """Names of the definitions that a property may hold."""
    nested = [*it.get("oneOf", ()), *it.get("anyOf", ())]
    nested += [
        it[key] for key in ("items", "additionalProperties") if isinstance(it.get(key), dict)
    ]
    own = [it["$ref"].rpartition("/")[2]] if "$ref" in it else []
    return own + [name for part in nested for name in _references(part)]


def _about(it: Schema, known: Mapping[str, Table]) -> list[str]:
    """What a table says of itself, for a key that says nothing."""
    names = _references(it)
    return [known[names[0]].schema.get("description", "")] if len(names) == 1 else []


def _type(it: Schema, known: Mapping[str, Table]) -> str:
    if "$ref" in it:
        return known[it["$ref"].rpartition("/")[2]].link
    for key in ("oneOf", "anyOf"):
        if key in it:
            return ", ".join(_type(part, known) for part in it[key])
    if "const" in it:
        return code(_toml(it["const"]))
    if "enum" in it:
        return ", ".join(code(_toml(value)) for value in it["enum"])
    kind = it.get("type", "any value")
    if kind == "array":
        return f"list of {_type(it.get('items', {}), known)}"
    if kind == "object":
        inner = it.get("additionalProperties")
        return f"table of {_type(inner, known)}" if isinstance(inner, dict) else "table"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = " and ".join(f"{sign} {it[key]}" for key, sign in signs.items() if key in it)
    return prose(f"{'none' if kind == 'null' else kind} {bounds}".strip())


def _default(model: type[BaseModel], key: str) -> str:
    default = model.model_fields[key].get_default(call_default_factory=True)
    if isinstance(default, list) and any(isinstance(it, BaseModel) for it in default):
        return ", ".join(code(_toml(it.type)) for it in default)
    if isinstance(default, BaseModel):
        return code(_toml(default.type)) if hasattr(default, "type") else ""
    return code(_toml(default))


def _toml(value: Any) -> str:
    match value:
        case None:
            return "<none>"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            inner = ", ".join(f"{key} = {_toml(it)}" for key, it in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return str(value)


# -- command line ---------------------------------------------------------------------------------


def command() -> list[str]:
    """A section for each command."""
    lines = [
        "# CLI reference",
        "",
        "Every command and option, as `--help` has them; [command line and Python](../client.md) "
        "has examples and exit statuses.",
        "",
    ]
    for path, it in _commands("ratchet", typer.main.get_command(cli)):
        context = it.context_class(it, info_name=path)
        lines += [f"## {path}", "", prose(it.help or ""), ""]
        lines += ["```", f"{path} {' '.join(it.collect_usage_pieces(context))}", "```", ""]
        found = [parameter.get_help_record(context) for parameter in it.params]
        rows = [(code(record[0]), prose(record[1])) for record in found if record]
        lines += table(("argument or option", "what it does"), rows) if rows else []
    return lines


def _commands(path: str, it: Any) -> Iterator[tuple[str, Any]]:
    """A command and all below it."""
    yield path, it
    if isinstance(it, TyperGroup):
        for name, inner in it.commands.items():
            yield from _commands(f"{path} {name}", inner)


# -- REST -----------------------------------------------------------------------------------------


def rest() -> list[str]:
    """A section for each operation, by tag."""
    settings = Settings(store_url="memory://", queues=Queues.prefixed("ratchet"))
    document = create_app(settings).openapi()
    lines = [
        "# REST reference",
        "",
        "Every operation. [REST](../rest.md) has what holds of all of them, `/docs` of an API has "
        "examples and schemas.",
        "",
    ]
    for tag in document["tags"]:
        lines += [f"## {tag['name']}", "", prose(tag["description"]), ""]
        for path, operations in document["paths"].items():
            for method, it in operations.items():
                if method != "head" and tag["name"] in it.get("tags", ()):
                    lines += [f"### {method.upper()} {path}", ""]
                    # The curl call is the last block.
                    lines += [it["description"].strip(), ""]
                    lines += _parameters(it, document)
    return lines


def _parameters(it: Schema, document: Schema) -> list[str]:
    """Parameters and the fields of a body."""
    rows = [
        (code(one["name"]), one["in"], prose(one.get("description", "")))
        for one in it.get("parameters", ())
        if one["in"] == "query"
    ]
    body = it.get("requestBody", {}).get("content", {}).get("application/json", {})
    for name in _references(body.get("schema", {})):
        fields = document["components"]["schemas"][name].get("properties", {})
        if name == RunConfig.__name__:
            rows.append(("", "body", "A run's [config](config.md)."))
            continue
        rows += [(code(key), "body", prose(f.get("description", ""))) for key, f in fields.items()]
    return table(("name", "in", "what it is"), rows) if rows else []


# -- metrics --------------------------------------------------------------------------------------


def metrics() -> list[str]:
    """Step metrics, gauges of workers, and what Prometheus scrapes."""
    lines = [
        "# Metrics reference",
        "",
        "SCOPE is `all` or an env's name. [Reading a run](../reading-a-run.md) says what to look "
        "at, [a run's data](../data.md) where records are stored.",
        "",
        "## Steps",
        "",
        "`ratchet runs metrics RUN`, `GET /v1/runs/RUN/metrics`. The statistics `mean`, `max` and "
        "`min` are over groups, of each group's own mean.",
        "",
    ]
    for title, described in SECTIONS.items():
        lines += [f"### {title}", ""]
        cells = []
        for row in described:
            about = prose(row.about)
            if row.statistics:
                about += f" STATISTIC: {', '.join(row.statistics)}."
            cells.append((code(row.name), row.unit, about))
        lines += table(("metric", "unit", "what it is"), cells)
    lines += [
        "## Gauges",
        "",
        "`GET /v1/runs/RUN/gauges`: samples of a rollout worker, one in ten seconds of work. "
        "Those of other workers have `time`, `source`, `role`, `event_loop_lag` and `usage`.",
        "",
    ]
    for title, model in (
        ("A sample", GaugeSample),
        ("event_loop_lag", LoopLag),
        ("usage", Usage),
        ("usage.gpus", GpuUsage),
    ):
        fields = model.model_fields.items()
        rows = [(code(key), prose(it.description or "")) for key, it in fields]
        lines += [f"### {title}", "", prose(model.__doc__ or ""), ""]
        lines += table(("field", "what it is"), rows)
    lines += ["## Prometheus", "", "`GET /metrics` of the API.", ""]
    requests = [*Requests().registry.collect()]
    gauges = [*run_gauges([], {}), *machine_gauges([], []), away_gauge()]
    lines += table(
        ("metric", "type", "what it is"),
        [
            (code(it.name + "_total" * (it.type == "counter")), it.type, prose(it.documentation))
            for it in [*requests, *gauges]
        ],
    )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
