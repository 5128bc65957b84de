"""The servers of a run, as its workflow knows them. Pure: reports in, targets out.

Invariant: an engine is offered to dispatch only while it is up and verified at some version of
this epoch; a report about an older epoch changes nothing.
"""

from collections import Counter

from ratchet.activities.contracts.hosting import HostReport, planned_hosts
from ratchet.activities.contracts.roles import ServerRole
from ratchet.activities.contracts.rollouts import EngineTarget
from ratchet.activities.contracts.servers import EnginePool
from ratchet.configs.run import RunConfig
from ratchet.workflows.protocol.messages import EnvTarget
from ratchet.workflows.protocol.state import HostState

MAX_DOWNS = 5
"""How often a server may fail to come up before its run gives up."""
PUT_AWAY = "closed for a pause"
"""The detail of a server that a pause has closed: its next start is not a restart."""
TOLD_OF_WAIT = 500
"""Characters kept of what a host waits for: all of them are in the run's state."""


def hosts_of(config: RunConfig, cores: int = 0) -> list[HostState]:
    """Every server the run needs where envs have so many `cores` (0: not known); those with an
    address are up and not hosted by the run.
    """
    return [
        HostState(
            planned.role,
            planned.index,
            planned.name,
            managed=planned.managed,
            up=not planned.managed,
            address=planned.address,
        )
        for planned in planned_hosts(config, cores)
    ]


def shared(hosts: list[HostState]) -> list[HostState]:
    """`hosts` as in builds that gave both sections of an env one server, the training one's; the
    same list if no env has two.
    """
    kept = [host for host in hosts if not host.name.startswith("eval/")]
    if len(kept) == len(hosts):
        return hosts
    envs = [host for host in kept if host.role == "env"]
    for index, host in enumerate(envs):
        host.index, host.name = index, host.name.rpartition("/")[2]
    return kept


def env_of(host: HostState) -> str:
    """The env that an env's host serves; an eval may have a server of its own."""
    return host.name.removeprefix("eval/")


def hold_of(host: HostState) -> str:
    """The name of the run's hold while `host` cannot start its server."""
    return f"host {host.role}/{host.index}"


def held_hosts(hosts: list[HostState]) -> dict[str, str]:
    """Why hosts cannot start their servers, by the names of their holds."""
    return {hold_of(host): host.waits for host in hosts if host.waits}


class Fleet(EnginePool):
    """Acts on the hosts of a run's state."""

    def __init__(self, hosts: list[HostState]) -> None:
        self.hosts = hosts
        # By env: losses of its server since its last group ended, whether or not it came up again.
        # No part of the state: a run that continues as new begins to count anew.
        self._in_vain: Counter[str] = Counter()

    def host(self, role: ServerRole, index: int) -> HostState:
        """The host at (role, index)."""
        return next(h for h in self.hosts if h.role == role and h.index == index)

    def of(self, role: ServerRole) -> list[HostState]:
        """All hosts of a role, by index."""
        return [h for h in self.hosts if h.role == role]

    def on_report(self, report: HostReport) -> bool:
        """Applies a host's report; False if it is about an epoch that is already over."""
        host = self.host(report.role, report.index)
        put_away = host.detail == PUT_AWAY
        over = report.epoch < host.epoch or (put_away and report.epoch == host.epoch)
        if report.state != "failed" and over:
            return False
        if report.epoch > host.epoch:
            # Earlier epochs are gone, whether or not they were seen going down.
            host.restarts += host.epoch > 0 and not put_away
            host.epoch, host.up, host.verified = report.epoch, False, -1
            host.detail = "" if put_away else host.detail
        if report.state == "starting":
            if host.up:
                return False
            # With a reason it cannot start yet; repeated without one, it can.
            host.waits = report.detail[:TOLD_OF_WAIT]
            host.detail = report.detail or host.detail
            return True
        host.waits = ""
        if report.state == "up":
            if host.up:
                return False
            host.up, host.downs = True, 0
            host.address, host.queue, host.model = report.address, report.queue, report.model
            host.verified, host.detail = -1, ""
        else:
            host.up, host.verified = False, -1
            self._in_vain[env_of(host)] += host.role == "env"
            host.downs += 1 if report.state == "down" else MAX_DOWNS
            host.detail = report.detail
        return True

    def mark_down(self, role: ServerRole, index: int, epoch: int, detail: str) -> None:
        """Takes a server out of use that an activity found gone."""
        host = self.host(role, index)
        if host.epoch == epoch and host.up:
            host.up, host.verified, host.detail = False, -1, detail

    def put_away(self, host: HostState) -> None:
        """A server was closed for a pause; its next keeper is another Host workflow."""
        host.up, host.verified, host.detail = False, -1, PUT_AWAY
        host.opened += 1

    def on_group(self, env: str) -> None:
        """A group of an env ended, so that its server does its work."""
        self._in_vain.pop(env, None)

    def dies_in_vain(self, host: HostState) -> bool:
        """Whether an env's server is lost again and again before a group of it ends."""
        return host.role == "env" and self._in_vain[env_of(host)] >= MAX_DOWNS

    def forgive(self) -> None:
        """A pause resets the counts of failures."""
        self._in_vain.clear()
        for host in self.hosts:
            host.downs = host.gate_failures = 0

    def broken(self) -> HostState | None:
        """A host that has failed too often in a row, if there is one."""
        return next((h for h in self.hosts if h.downs >= MAX_DOWNS), None)

    def engines(self) -> list[EngineTarget]:
        """Engines that may get traffic."""
        return [
            EngineTarget(h.index, h.epoch, h.address, h.model, h.verified)
            for h in self.of("engine")
            if h.up and h.verified >= 0
        ]

    def envs(self) -> dict[str, EnvTarget]:
        """The env servers that are up, by their names."""
        return {h.name: EnvTarget(h.index, h.epoch, h.address) for h in self.of("env") if h.up}

    def missing(self) -> list[str]:
        """Names of the servers that are not up."""
        return [h.name for h in self.hosts if not h.up]

    def synced(self, version: int) -> bool:
        """Some engine is verified at `version`, and no engine that is up is behind it."""
        up = [h for h in self.of("engine") if h.up]
        return bool(up) and all(h.verified == version for h in up)

    def restarts(self) -> dict[str, int]:
        """Restarts so far, by role."""
        counts: dict[str, int] = {}
        for host in self.hosts:
            counts[host.role] = counts.get(host.role, 0) + host.restarts
        return counts
