# SPDX-License-Identifier: Apache-2.0
"""Which back end a daemon would pace with on this host, and why: `flowslot doctor`."""

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any

from flowslot_proto.tls import SOON, TlsFiles, TlsSettings, utc_now
from flowslotd.diagnose.probe import Finding, probe, usable_backends
from flowslotd.pace.select import AUTO, TRAITS

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`backend`: the one that would be used. `none`: flows would only be observed."""

    wanted: str
    backend: str
    why: str
    findings: list[Finding]


def diagnose(wanted: str = "auto") -> Diagnosis:
    """`wanted`: as `pacing.backend` in a configuration. Takes some tenths of a second, and leaves
    only the modules that the kernel has loaded for it."""
    findings = probe()
    works = usable_backends(findings)
    if wanted == "auto":
        order = [name for name in AUTO if name in works]
        backend = next((name for name in order if works[name].status == "ok"), "none")
        reasons = [f"auto tries {' then '.join(order)}"]
        for name in order[: order.index(backend)] if backend in order else order:
            reasons.append(f"{name} does not work ({works[name].detail})")
        why = "; ".join(reasons)
    elif wanted == "none":
        backend, why = "none", "the configuration says so"
    elif works[wanted].status == "ok":
        backend, why = wanted, "the configuration says so, and it works here"
    else:
        backend = "none"
        why = f"the configuration wants {wanted}, which does not work: {works[wanted].detail}"
    return Diagnosis(wanted, backend, why, findings)


def tls(settings: TlsSettings, files: TlsFiles | None) -> Finding:
    """How this host and switch processes know each other."""
    if settings.insecure:
        advice = "Give ca, certificate and key in [tls]; `flowslot certs init` makes them."
        detail = "insecure = true: no TLS, anybody may pretend to be any host"
        return Finding("TLS", "warn", detail, advice)
    if files is None:
        return Finding("TLS", "ok", "none: switch processes are on this machine, or there are none")
    good, now = files.current(), utc_now()
    detail = f"certificate of {', '.join(good.names)}, until {good.ends:%Y-%m-%d}"
    if problem := files.error or good.doubt(now):
        return Finding("TLS", "missing", problem, "Bring good files; they are read at once.")
    if good.ends - now < SOON:
        advice = "Make a new one: `flowslot certs init --renew`, or as your CA has it."
        return Finding("TLS", "warn", f"{detail}: soon", advice)
    return Finding("TLS", "ok", detail)


def as_data(found: Diagnosis) -> dict[str, Any]:
    """For JSON and YAML."""
    works = usable_backends(found.findings)
    return {
        "backend": found.backend,
        "why": found.why,
        "backends": [
            {"name": name, "works": works[name].status == "ok", "detail": works[name].detail}
            | dataclasses.asdict(traits)
            for name, traits in TRAITS.items()
        ],
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }


def table(found: Diagnosis) -> str:
    """For people."""
    width = max(len(finding.name) for finding in found.findings)
    lines = []
    for finding in found.findings:
        lines.append(f"{finding.status:8} {finding.name:{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"{'':8} {'':{width}}  -> {finding.advice}")
    lines += ["", "Back ends (pacing.backend):"]
    works = usable_backends(found.findings)
    for name, traits in TRAITS.items():
        state = "works here" if works[name].status == "ok" else f"not here: {works[name].detail}"
        lines.append(f"  {name:7} {state}")
        facts = {
            "how": traits.how,
            "paces": ", ".join(traits.protocols),
            "leaves at once": traits.granularity,
            "follows a raise after": traits.resume,
            "changes": "; ".join(what for _, what in traits.changes),
        }
        for fact, text in facts.items():
            lines += textwrap.wrap(
                f"{fact}: {text}", _WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 12
            )
    return "\n".join([*lines, "", verdict(found)])


def verdict(found: Diagnosis) -> str:
    """One sentence."""
    if found.backend == "none" and found.wanted not in {"auto", "none"}:
        return f"flowslotd would not start with mode = enforce: {found.why}."
    if found.backend == "none":
        return f"Flows would not be paced here, flowslotd would only observe: {found.why}."
    return f"Flows would be paced by {found.backend}: {found.why}."
