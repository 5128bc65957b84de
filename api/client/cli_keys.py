"""`ratchet keys`: who may use the API of this machine. Works without a running API."""

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
from ratchet.configs.home import KEYS_FILE, home_folder

keys = typer.Typer(
    cls=JsonAnywhere,
    help="Create, list and revoke keys for the API of this machine. An API that was started with "
    "keys picks up changes at once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

TITLE = "The keys cannot be read or changed"
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=3650)


def _lifetime(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,6})([mhdw])", text)
    result = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else LONGEST * 2
    if result > LONGEST:
        raise ValueError(
            f"--expires {text!r} is not a duration: use a number and m, h, d or w, such as 30d, at "
            f"most {LONGEST.days}d"
        )
    return result


@contextmanager
def _refusing(as_json_: bool) -> Iterator[None]:
    """Turns a ValueError into one line and the exit status of a refusal."""
    try:
        yield
    except ValueError as error:
        why = str(error).splitlines()[0]
        problem = {"type": "urn:ratchet:problem:invalid-keys", "title": TITLE, "detail": why}
        print(json.dumps(problem) if as_json_ else f"ratchet: {why}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None


@keys.command("new")
def new_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="It allows no changes.")] = False,
    per_minute: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Requests a minute.")
    ] = PER_MINUTE,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long it is valid: 12h, 30d; empty: forever.")
    ] = "",
    as_json_: Json = False,
) -> None:
    """Create a key, print it once, and store its hash."""
    file = home_folder() / KEYS_FILE
    with _refusing(as_json_):
        until = datetime.now(UTC).replace(microsecond=0) + _lifetime(expires) if expires else None
        first = not file.exists()
        key = add(file, name, ["read"] if read_only else ["read", "write"], per_minute, until)
    if as_json_:
        print_json({"name": name, "key": key, "file": str(file), "restart": first})
        return
    print(key)
    follows = (
        "a running API requires keys once it is restarted"
        if first
        else "an API with keys accepts it"
    )
    print(f"Its hash is in {file}; {follows}.", file=sys.stderr)


@keys.command("list")
def list_keys(as_json_: Json = False) -> None:
    """List the keys: name, scopes, requests a minute, expiry."""
    with _refusing(as_json_):
        listed = load_keys(None, home_folder() / KEYS_FILE)
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner.")],
    as_json_: Json = False,
) -> None:
    """Revoke a key: the API refuses requests with it from now on, and ends its streams."""
    with _refusing(as_json_):
        revoke(home_folder() / KEYS_FILE, name)
    if as_json_:
        print_json({"name": name, "revoked": True})
        return
    print(f"revoked key {name}")
