"""`python -m ratchet.api.client`: the `ratchet` command."""

from ratchet.api.client.cli import app

if __name__ == "__main__":
    app(prog_name="ratchet")
