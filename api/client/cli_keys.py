"""`ratchet keys`: who may use the API of this machine. Needs no API that runs."""

import sys
from typing import Annotated

import typer

from ratchet.api.client.options import REFUSED
from ratchet.api.schemas.keys import PER_MINUTE, add
from ratchet.configs.home import home_folder

keys = typer.Typer(
    help="Makes keys for the API of this machine.", no_args_is_help=True, rich_markup_mode=None
)


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="It may change nothing.")] = False,
    per_minute: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Requests a minute.")
    ] = PER_MINUTE,
) -> None:
    """Make a key, print it once, and keep its hash."""
    file = home_folder() / "api_keys.json"
    try:
        key = add(file, name, ["read"] if read_only else ["read", "write"], per_minute)
    except ValueError as error:
        print(f"ratchet: {str(error).splitlines()[0]}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    print(key)
    print(f"Its hash is in {file}; restart the API.", file=sys.stderr)
