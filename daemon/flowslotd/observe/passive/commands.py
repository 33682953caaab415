# SPDX-License-Identifier: Apache-2.0
"""What operators may ask of `PassiveSources`: `flowslot enlist` and `flowslot release`.

A request has the field `pid` (a number) or `cgroup` (a path); `enlist` may have `job` (its name),
`release` may have neither, and means all.
"""

from collections.abc import Mapping

from flowslot.model.errors import ConfigError
from flowslot_proto.control import Json
from flowslotd.observe.passive.service import PassiveSources
from flowslotd.observe.passive.targets import Target, folder_of


def enlist(passive: PassiveSources, request: Mapping[str, object]) -> Json:
    """Watch a process or a control group. Raises ConfigError: nothing is enlisted then."""
    pid, cgroup, job = (request.get(name) for name in ("pid", "cgroup", "job"))
    if (pid is None) == (cgroup is None):
        raise ConfigError("enlist", "pid", "must be given, or else `cgroup`")
    if not isinstance(job, str | None) or job == "" or not (job or "").isprintable():
        raise ConfigError("enlist", "job", "must be a name, of printable characters")
    if pid is None:
        if not isinstance(cgroup, str):
            raise ConfigError("enlist", "cgroup", "must be the path of a control group")
        target = Target.group(cgroup, job or "")
    else:
        if not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
            raise ConfigError("enlist", "pid", f"{pid!r}: must be the number of a process")
        target = Target.process(pid, job or "")
    passive.enlist(target)
    return describe([target])


def release(passive: PassiveSources, request: Mapping[str, object]) -> Json:
    """Leave it alone again. Raises ConfigError: it is not enlisted."""
    pid, cgroup = request.get("pid"), request.get("cgroup")
    if pid is not None and cgroup is not None:
        raise ConfigError("release", "pid", "must not be given with `cgroup`")
    if pid is not None:
        return describe(passive.release(("pid", str(pid))))
    if cgroup is None:
        return describe(passive.release(None))
    known = {target.name for target in passive.enlisted}
    name = str(cgroup) if cgroup in known else str(folder_of("release", str(cgroup)))
    return describe(passive.release(("cgroup", name)))


def describe(targets: list[Target]) -> Json:
    """As JSON."""
    return {"targets": [{one.kind: one.name, "job": one.job.decode()} for one in targets]}
