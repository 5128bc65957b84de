"""`ratchet keys`: who may use the API of this machine. Needs no API that runs."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from ratchet.api.client.options import REFUSED, Json, JsonAnywhere
from ratchet.api.client.printing import print_json
from ratchet.api.schemas.keys import PER_MINUTE, add, load_keys, revoke
from ratchet.configs.home import home_folder

keys = typer.Typer(
    cls=JsonAnywhere,
    help="Makes, lists and revokes keys for the API of this machine. An API that was started with "
    "keys follows at once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FILE = "api_keys.json"
TITLE = "The keys cannot be used, or not so changed"
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


def _lifetime(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,6})([mhdw])", text)
    result = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else LONGEST * 2
    if result > LONGEST:
        raise ValueError(
            f"--expires {text!r} is no time: use a number and m, h, d or w, such as 30d, at most "
            f"{LONGEST.days}d"
        )
    return result


@contextmanager
def _refusing(as_json_: bool) -> Iterator[None]:
    """Makes a ValueError one line and the exit status of what is refused."""
    try:
        yield
    except ValueError as error:
        why = str(error).splitlines()[0]
        problem = {"type": "urn:ratchet:problem:invalid-keys", "title": TITLE, "detail": why}
        print(json.dumps(problem) if as_json_ else f"ratchet: {why}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="It may change nothing.")] = False,
    per_minute: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Requests a minute.")
    ] = PER_MINUTE,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long it is valid: 12h, 30d; none: always.")
    ] = "",
    as_json_: Json = False,
) -> None:
    """Make a key, print it once, and keep its hash."""
    file = home_folder() / FILE
    with _refusing(as_json_):
        until = datetime.now(UTC).replace(microsecond=0) + _lifetime(expires) if expires else None
        first = not file.exists()
        key = add(file, name, ["read"] if read_only else ["read", "write"], per_minute, until)
    if as_json_:
        print_json({"name": name, "key": key, "file": str(file), "restart": first})
        return
    print(key)
    follows = "an API that runs asks for keys once it is restarted" if first else "the API knows it"
    print(f"Its hash is in {file}; {follows}.", file=sys.stderr)


@keys.command("list")
def list_keys(as_json_: Json = False) -> None:
    """List the keys: name, scopes, requests a minute, end."""
    with _refusing(as_json_):
        listed = load_keys(None, home_folder() / FILE)
    if as_json_:
        data = [
            {**key.model_dump(mode="json", exclude={"sha256"}), "expired": key.expired}
            for key in listed
        ]
        print_json({"object": "list", "data": data, "has_more": False})
        return
    for key in listed:
        end = f"{key.expires_at:%Y-%m-%dT%H:%M:%SZ}" if key.expires_at else "-"
        state = "expired" if key.expired else "valid"
        print(f"{key.name}\t{','.join(key.scopes)}\t{key.per_minute}\t{end}\t{state}")


@keys.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    as_json_: Json = False,
) -> None:
    """Take a key away: requests with it are refused from now on, and streams end."""
    with _refusing(as_json_):
        revoke(home_folder() / FILE, name)
    if as_json_:
        print_json({"name": name, "revoked": True})
