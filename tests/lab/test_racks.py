# SPDX-License-Identifier: Apache-2.0
"""Networks with racks on the real kernel: their links, and runs over them."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from flowslot_lab.net import Network, control_ip, data_ip
from flowslot_lab.state import RunState
from flowslot_lab.tools import run
from flowslot_scenario.scenario import Scenario, parse

from .conftest import LEAVES_NOTHING, TWO_RACKS

pytestmark = pytest.mark.root

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print(flush=True)
    peer = server.accept()[0]
    while peer.recv(1 << 16):
        pass
"""
KNOCK = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), 5)
    except ConnectionRefusedError:  # nobody listens, but somebody says so
        print(address)
"""
SEND = """
import socket, sys
with socket.socket() as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    peer.connect((sys.argv[1], 5001))
    while True:
        peer.sendall(bytes(1 << 16))
"""


@pytest.fixture
def scenario() -> Scenario:
    return parse(TWO_RACKS, "racks.toml")


@pytest.fixture
def net(scenario: Scenario, state: RunState) -> Iterator[Network]:
    net = Network(scenario, state)
    net.up()
    yield net
    net.down()


@pytest.fixture
def send(net: Network) -> Iterator[object]:
    """`send("h1", "h3")`: TCP as fast as it goes, until the test ends."""
    started = []

    def python(host: str, program: str, address: str) -> subprocess.Popen[bytes]:
        command = ["nsenter", f"--net=/run/netns/{net.hosts[host]}", sys.executable, "-c"]
        process = subprocess.Popen([*command, program, address], stdout=subprocess.PIPE)
        started.append(process)
        return process

    def begin(src: str, dst: str) -> None:
        address = data_ip(net.scenario.index(dst))
        server = python(dst, SERVE, address)
        server.stdout.readline()
        python(src, SEND, address)

    yield begin
    for process in reversed(started):  # senders first: their peers then see the end
        process.kill()
        process.communicate()


def used(net: Network, seconds: float = 2.0) -> dict[str, float]:
    """Share of its rate that each link carries for a while."""
    before = net.counters()
    time.sleep(seconds)
    after = net.counters()
    elapsed = after.at_s - before.at_s
    return {
        link: (after.link_bytes[link] - sent) * 8 / elapsed / net.scenario.capacity_bps(link)
        for link, sent in before.link_bytes.items()
    }


@LEAVES_NOTHING
def test_links_and_uplinks_have_their_rates_and_buffers(net: Network, state: RunState) -> None:
    assert list(net.switches) == ["core", "r1", "r2"]
    for rack in ("r1", "r2"):
        for name in (f"{rack}->core", f"core->{rack}"):
            port = net.ports[name]
            assert port.space == f"fl{state.id}-{name.split('->')[0]}"
            queues = run(["tc", "-n", port.space, "qdisc", "show", "dev", port.device])
            assert "bfifo" in queues and ("limit 32000b" in queues or "limit 31250b" in queues)
            classes = run(["tc", "-n", port.space, "class", "show", "dev", port.device])
            # 600 us of 50 Mbit/s, and a packet for each port on the way.
            shown = re.search(r"rate 50Mbit ceil 50Mbit burst (\d+)b", classes)
            burst = 3750 + 1514 * (1 if name.startswith(rack) else 2)
            assert int(shown[1]) == pytest.approx(burst, abs=20)  # the kernel counts in ticks
            command = ["nsenter", f"--net=/run/netns/{port.space}", "ethtool", "-k", port.device]
            offloads = run(command)
            for feature in ("tcp-segmentation", "generic-segmentation", "generic-receive"):
                assert f"{feature}-offload: off" in offloads
    nic = run(["ip", "-n", net.hosts["h3"], "-details", "link", "show", "dev", "eth0"])
    assert "gso_max_segs 2 " in nic  # for the smallest buffer, which is an uplink's
    assert list(net.counters().link_bytes) == list(net.scenario.directed_links())


def test_all_hosts_reach_each_other_on_both_networks(net: Network) -> None:
    everyone = [address(i) for address in (data_ip, control_ip) for i in range(3)]
    everyone += ["10.77.0.250", "10.77.1.1", "10.77.1.2"]
    for space in net.hosts.values():
        command = ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-c", KNOCK]
        assert run([*command, *everyone]).split() == everyone


def filled(net: Network, link: str) -> dict[str, float]:
    """Shares once this link is full: a busy machine may not fill it at once."""
    time.sleep(0.5)
    for _ in range(5):
        share = used(net)
        if share[link] > 0.95:
            break
    return share


def test_tcp_between_racks_gets_what_the_uplink_carries(net: Network, send) -> None:
    send("h1", "h3")
    share = filled(net, "r1->core")
    assert 0.95 < share["r1->core"] < 1.05
    assert share["core->r2"] == pytest.approx(share["r1->core"], rel=0.02)
    # At half of their rate: no host's link is slower than the uplink.
    for link in ("h1->r1", "r2->h3"):
        assert share[link] == pytest.approx(share["r1->core"] / 2, rel=0.05)
    assert share["r2->core"] < 0.1 and share["r1->h2"] < 0.01


def test_tcp_within_a_rack_stays_there(net: Network, send) -> None:
    send("h1", "h2")
    share = filled(net, "h1->r1")
    assert share["h1->r1"] > 0.9
    assert max(share["r1->core"], share["core->r1"], share["r2->h3"]) < 0.001
