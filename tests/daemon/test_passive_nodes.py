# SPDX-License-Identifier: Apache-2.0
"""Which processes are nodes of ps-lite, by what their environment says. Anybody can write one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowslot_shm.layout import Role
from flowslotd.observe.passive.nodes import MAX_ENVIRONMENT, Node, node_of

ROOT = b"DMLC_PS_ROOT_URI=10.0.0.1\0DMLC_PS_ROOT_PORT=9000\0"
WORKER, PLAIN = ROOT + b"DMLC_ROLE=worker\0", Node(b"pslite-10.0.0.1-9000", Role.PUSH, 9000)


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        (WORKER, PLAIN),
        (b"DMLC_ROLE=server\0" + ROOT, Node(b"pslite-10.0.0.1-9000", Role.PULL, 9000)),
        (WORKER + b"FLOWSLOT_JOB=bert\0", Node(b"bert", Role.PUSH, 9000)),
        (WORKER + b"FLOWSLOT_JOB=\0", PLAIN),
        (WORKER + b"FLOWSLOT_JOB=" + b"a b\xe9" + b"x" * 40 + b"\0",
         Node(b"a_b_" + b"x" * 18 + b"-50dd9f61", Role.PUSH, 9000)),
        # As Kubernetes names services: one that is too long ends with a hash.
        (b"DMLC_PS_ROOT_URI=bert-large-pretrain-team-1.ml\0DMLC_PS_ROOT_PORT=9000\0"
         b"DMLC_ROLE=server\0",
         Node(b"pslite-bert-large-pret-e20e7a5f", Role.PULL, 9000, spelled=True)),
        # Addresses and ports have one spelling.
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_URI=::ffff:10.0.0.1\0DMLC_PS_ROOT_PORT=09000\0", PLAIN),
        (b"DMLC_ROLE=server\0DMLC_PS_ROOT_URI=FD00:0::1\0DMLC_PS_ROOT_PORT=9000\0",
         Node(b"pslite-fd00::1-9000", Role.PULL, 9000)),
        # Worker and server in one process.
        (ROOT + b"DMLC_ROLE=joint\0", Node(b"pslite-10.0.0.1-9000", Role.UNKNOWN, 9000)),
        # getenv() takes the first one.
        (WORKER + b"DMLC_ROLE=server\0", PLAIN),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=1\0",
         Node(b"pslite--1", Role.PUSH, 1, spelled=True)),
        (ROOT + b"DMLC_ROLE=scheduler\0", None),
        (ROOT + b"DMLC_ROLE=\0", None),
        (ROOT + b"XDMLC_ROLE=worker\0", None),
        (ROOT, None),
        (b"DMLC_ROLE=worker\0", None),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=0\0", None),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=65536\0", None),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=-1\0", None),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=\xb2\0", None),
        (b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=" + b"9" * 10_000, None),
        (b"x" * MAX_ENVIRONMENT + b"\0DMLC_ROLE=worker\0" + ROOT, None),
        (b"", None),
    ],
)  # fmt: skip
def test_a_node_is_named_as_the_patch_names_it(environment: bytes, node: Node | None) -> None:
    assert node_of(environment) == node


SPELLED = b"DMLC_ROLE=worker\0DMLC_PS_ROOT_URI=%s\0DMLC_PS_ROOT_PORT=9000\0"


@pytest.mark.parametrize(
    ("uri", "peers", "job"),
    [
        (b"sched", ["10.0.0.1"], b"pslite-10.0.0.1-9000"),
        (b"sched.team-a.svc", ["10.0.0.1", "10.0.0.1"], b"pslite-10.0.0.1-9000"),
        (b"10.0.0.1", ["10.0.0.7"], b"pslite-10.0.0.1-9000"),  # something else at that port
        (b"sched", ["10.0.0.2"], b"pslite-10.0.0.2-9000"),  # another team's
        (b"sched", [], b"pslite-sched-9000"),
        (b"sched", ["10.0.0.1", "10.0.0.7"], b"pslite-sched-9000"),
        (b"sched\0FLOWSLOT_JOB=bert", ["10.0.0.1"], b"bert"),
    ],
)
def test_a_job_is_named_after_where_its_scheduler_is(
    uri: bytes, peers: list[str], job: bytes
) -> None:
    node = node_of(SPELLED % uri)
    assert node is not None and node.named(set(peers)) == job


@given(st.binary(max_size=200), st.binary(max_size=60), st.binary(max_size=60))
def test_no_environment_is_strange_enough(junk: bytes, port: bytes, job: bytes) -> None:
    node = node_of(
        b"DMLC_ROLE=worker\0DMLC_PS_ROOT_PORT=" + port + b"\0FLOWSLOT_JOB=" + job + b"\0" + junk
    )
    if node is not None:
        for name in (node.job, node.named({"::1"})):
            assert 1 <= len(name) <= 31
            assert all(0x21 <= c <= 0x7E for c in name)
        assert 1 <= node.scheduler_port <= 65535
