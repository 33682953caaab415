# SPDX-License-Identifier: Apache-2.0
"""What the configuration says of processes that report nothing, and what follows from it."""

import numpy as np
import pytest

from flowslot.model.errors import ConfigError
from flowslot_shm.layout import SLOT, Role
from flowslotd import config
from flowslotd.diagnose.preflight import changes
from flowslotd.flows.flow_table import FlowTable
from flowslotd.observe.observer import Observer


def test_by_default_they_are_left_alone(write):
    assert config.load(write('host = "h1"')).settings.unpatched.pslite is False


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ('pslite = "yes"', "unpatched.pslite", "must be"),
        ("pslit = true", "unpatched.pslit", "did you mean `pslite`?"),
    ],
)
def test_what_is_wrong_is_named(write, text, field, problem):
    with pytest.raises(ConfigError) as caught:
        config.load(write(f'host = "h1"\n[unpatched]\n{text}'))
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_a_reload_may_change_it(write):
    old = config.load(write('host = "h1"'))
    new = config.load(write('host = "h1"\n[unpatched]\npslite = true'))
    assert config.changed(old, new) == ["unpatched"]


@pytest.mark.parametrize(("backend", "told"), [("bpf", True), ("socket", False)])
def test_preflight_says_that_their_sockets_would_be_changed(write, backend, told):
    text = 'host = "h1"\nmode = "enforce"\n[unpatched]\npslite = true'
    found = changes(config.load(write(text)), backend)
    said = [(change.where, change.when) for change in found if "ps-lite" in change.what]
    assert said == [("sockets", "as soon as they are found")] * told  # not only while paced


def test_nobody_waits_for_flows_whose_ranks_are_not_known(topology, make_job):
    """Iterations are counted from when they were first seen: those of two hosts do not match."""
    observer = Observer(FlowTable(topology, "h1"), lambda *_: True)
    job = make_job()
    known, unknown = (job.flow(n, cookie=10 + n, role=Role.PUSH) for n in range(2))
    np.frombuffer(job.record.slot(1), SLOT)["rank"] = -1
    for flow in (known, unknown):
        flow.begin(1, 1000)
        flow.ready(1000)
    observer.observe(1, [job], None)
    assert len(observer.table) == 2
    assert [flow.flow for flow in observer.table.transfers({})] == [10]
