"""A container's health check: exit status 0 if /healthz on RATCHET_HEALTH_PORT answers 200."""

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4


def main() -> int:
    """Returns 0 for healthy, 1 for anything else, with the reason on standard error."""
    url = f"http://127.0.0.1:{os.environ.get('RATCHET_HEALTH_PORT', '8090')}/healthz"
    try:
        # Without the environment's proxies, which lead nowhere near this container.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=TIMEOUT_S):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
