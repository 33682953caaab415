# SPDX-License-Identifier: Apache-2.0
"""The machine is not as the configuration says: it is another host, its name is a loopback address
there, the address is on `lo`, a device has another name, the kernel sends by another NIC."""

import json
import os
import socket
import subprocess

import pytest
from waiting import settle

from flowslotd.sockets import look

from .conftest import TOPOLOGY
from .test_daemon import FLOWS, PROGRAMS, SIZE, Daemon, Hosts, Job, ip

pytestmark = pytest.mark.root

TWO_NICS = TOPOLOGY.replace(
    'down = "s1->h1" }]',
    'down = "s1->h1" }, { name = "right", addresses = ["10.78.1.1"], '
    'up = "h1-right->s1", down = "s1->h1-right" }]',
    1,
) + "".join(
    f'[[links]]\nname = "{name}"\ncapacity_gbps = 0.1\n'
    for name in ("h1-right->s1", "s1->h1-right")
)
SLOW = 0.1e9 / 8 * 1448 / 1514 / FLOWS  # of h1-right->s1, payload bytes/s


class Space:
    """A network namespace `of` its own, with devices that lead nowhere."""

    def __init__(self, stack, folder, topology=TOPOLOGY):
        self.name, self.folder = f"fsm{os.getpid()}", folder
        ip("netns", "add", self.name)
        stack.callback(ip, "netns", "del", self.name)
        self.ip("link set lo up")
        (folder / "topology.toml").write_text(topology)

    def ip(self, *lines):
        for line in lines:
            ip("-n", self.name, *line.split())

    def cable(self, device, *addresses):
        self.ip(f"link add {device} type veth peer name {device}-far")
        self.ip(f"link set {device} up", f"link set {device}-far up")
        self.ip(*(f"address add {address} dev {device}" for address in addresses))

    def enter(self, *command, hosts=None):
        """That command, there. `hosts`: the text of its /etc/hosts."""
        enter = ["nsenter", f"--net=/run/netns/{self.name}"]
        if hosts is not None:
            (self.folder / "hosts").write_text(hosts)
            mount = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
            enter += ["unshare", "--mount", "sh", "-c", mount, "sh"]
        return [*enter, *map(str, command)]

    def run(self, *command, hosts=None):
        command = self.enter(PROGRAMS / "flowslot", *command, hosts=hosts)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def until(self, text, program, config, *, hosts=None):
        """All that a program says on stderr if it is told to stop when it has said `text`."""
        command = self.enter(PROGRAMS / program, "--config", config, hosts=hosts)
        with subprocess.Popen(command, text=True, stderr=subprocess.PIPE) as process:
            said = ""
            while text not in said:
                line = process.stderr.readline()
                assert line, f"ended, and has only said: {said}"
                said += line
            process.terminate()
            return said + process.stderr.read()

    def configure(self, host="h1", *, devices=None, **more):
        file = self.folder / f"{host}.toml"
        lines = {"host": host, "mode": "enforce", "runtime_dir": str(self.folder / "run"), **more}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
        text += '[pacing]\nbackend = "htb"\n'
        file.write_text(text + (f"devices = {json.dumps(devices)}\n" if devices else ""))
        return file

    def preflight(self, *args, **settings):
        run = self.run("preflight", self.configure(*args, **settings), "-o", "json")
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def on_devices(self, *args, **settings):
        """What preflight says of devices: when each is changed, and why if never."""
        changes = self.preflight(*args, **settings)["changes"]
        apart = ("files", "sockets", "kernel", "network", "sysctl")
        return {one["where"]: one for one in changes[::-1] if one["where"] not in apart}


@pytest.fixture
def space(stack, tmp_path):
    return Space(stack, tmp_path)


# --- which host it is


def test_the_configuration_of_another_host_is_said_to_be_one(space):
    space.cable("net0", "10.78.0.1/24")
    said = 'field `host`: is "h2", but none of its addresses (10.78.0.2) is on this machine'
    found = space.preflight("h2")
    (doubt,) = found["doubts"]
    assert doubt.endswith(f'h2.toml: {said}, which has 10.78.0.1: did you mean "h1"?')
    assert "net0" not in {one["where"] for one in found["changes"]}, "of another host"
    space.until(f"WARNING: {space.folder}/h2.toml: {said}", "flowslotd", space.configure("h2"))
    assert space.preflight("h1")["doubts"] == []


def test_doctor_says_it_too_and_that_an_address_is_missing(stack, tmp_path):
    space = Space(stack, tmp_path, TOPOLOGY.replace('"10.78.0.1"', '"10.78.0.1", "10.78.0.9"'))
    space.cable("net0", "10.78.0.1/24")
    run = space.run("doctor", "--config", space.configure(), "-o", "json")
    findings = json.loads(run.stdout)["findings"]
    said = "10.78.0.9, an address of h1 in the topology, is not on this machine"
    assert [one["detail"] for one in findings if one["name"] == "machine"] == [said]


# --- what its name is here

NAMED = TOPOLOGY.replace('name = "h1"\n', 'name = "h1"\ndaemon = "box1:7401"\n')
HELD_THERE = '[[switches]]\nname = "s1"\naddress = "box1:7400"\n' + TOPOLOGY.replace(
    "capacity_gbps", 'switch = "s1"\ncapacity_gbps', 1
)
BAD, GOOD = "127.0.1.1 box1\n", "10.78.0.1 box1\n"
ONLY_HERE = "box1 is 127.0.1.1 on this machine, which no other host can reach"


def test_a_daemon_whose_own_name_is_a_loopback_address_says_so(stack, tmp_path):
    space = Space(stack, tmp_path, NAMED)
    space.cable("net0", "10.78.0.1/24")
    config = space.configure(policy="mlcc")
    space.until(f"no other daemon will be heard: {ONLY_HERE}", "flowslotd", config, hosts=BAD)
    for hosts, wrong in ((BAD, [ONLY_HERE]), (GOOD, [])):
        run = space.run("preflight", config, "-o", "json", hosts=hosts)
        found = json.loads(run.stdout)["doubts"]
        assert [doubt.partition(":")[0] for doubt in found] == wrong


def test_a_switch_process_whose_own_name_is_a_loopback_address_says_so(stack, tmp_path):
    space = Space(stack, tmp_path, HELD_THERE)
    space.cable("net0", "10.78.0.1/24")
    space.ip("route add default via 10.78.0.77")  # who asks a DNS server waits for it
    config = tmp_path / "switch.toml"
    config.write_text('name = "s1"\n[tls]\ninsecure = true\n')
    listens = "listening on box1:7400"
    assert ONLY_HERE in space.until(listens, "flowslot-switch", config, hosts=BAD)
    elsewhere = GOOD + "192.0.2.9 box1\n"  # one of its addresses is not there (yet)
    for hosts in (GOOD, elsewhere):
        assert "no other host" not in space.until(listens, "flowslot-switch", config, hosts=hosts)


def test_a_daemon_that_takes_anothers_name_for_itself_says_so(stack, tmp_path):
    space = Space(stack, tmp_path, HELD_THERE)
    space.cable("net0", "10.78.0.1/24")
    config = space.configure()
    config.write_text(config.read_text() + "[tls]\ninsecure = true\n")
    space.until(f"refused ({ONLY_HERE}", "flowslotd", config, hosts=BAD)


def test_another_daemons_name_that_is_a_loopback_address_here_is_said(stack, tmp_path):
    space = Space(stack, tmp_path, NAMED.replace('"h2"\n', '"h2"\ndaemon = "box2:7401"\n'))
    space.cable("net0", "10.78.0.1/24")
    hosts = GOOD + "127.0.1.1 box2\n"
    said = "peers: box2 is 127.0.1.1 on this machine"
    space.until(said, "flowslotd", space.configure(policy="mlcc"), hosts=hosts)


# --- which devices are meant


def test_an_address_on_lo_means_the_devices_that_routes_lead_to(space):
    space.ip("address add 10.78.0.1/32 dev lo")
    for device in ("up0", "up1", "aside"):
        space.cable(device)
    hops = "nexthop via 169.254.7.1 dev up0 onlink nexthop via 169.254.7.2 dev up1 onlink"
    space.ip(f"route add default src 10.78.0.1 {hops}")
    found = space.on_devices()
    assert set(found) == {"up0", "up1"}, "nothing leaves by lo or aside"
    for device, change in found.items():
        assert change["when"] == "never"
        assert f"{device} has none of this host's addresses" in change["what"]
        assert change["what"].endswith("name it in pacing.devices")
    named = space.on_devices(devices=["up0", "up1"])
    assert {device: one["when"] for device, one in named.items()} == dict.fromkeys(
        ("up0", "up1"), "at its start"
    )
    assert space.preflight()["doubts"] == [], "one link for both is what the topology says"


def test_a_device_is_found_by_an_alternative_name(space):
    space.cable("net0", "10.78.0.1/24")
    long = "enp193s0f0np0-of-the-left-card"
    for name in ("enp193s0f0np0", long):
        space.ip(f"link property add dev net0 altname {name}")
    for names in (["enp193s0f0np0"], [long], ["net0", long, "net0"]):
        changes = space.preflight(devices=names)["changes"]
        assert [one["where"] for one in changes].count("net0") == 2  # the root, and what is below
    run = space.run("preflight", space.configure(devices=["enp193s0f0np1"]))
    assert 'no network device enp193s0f0np1; did you mean "enp193s0f0np0"?' in run.stderr


# --- by which NIC a flow leaves


@pytest.fixture
def hosts(stack):
    """h1 has two cables to h2."""
    hosts = Hosts(stack)
    here, there = hosts.names
    ip("-n", here, "link", "add", "net1", "type", "veth", "peer", "name", "net1", "netns", there)
    for name, address in ((here, "10.78.1.1/24"), (there, "10.78.1.2/24")):
        ip("-n", name, "address", "add", address, "dev", "net1")
        ip("-n", name, "link", "set", "net1", "up")
        settings = [f"net.ipv4.conf.{one}.rp_filter=0" for one in ("all", "eth0", "net1")]
        hosts.start(hosts.names.index(name) + 1, "sysctl", "-qw", *settings).wait()
    ip("-n", here, "route", "add", "10.78.0.2", "dev", "net1", "table", "100")
    return hosts


def sent_by(hosts, device):
    shown = subprocess.run(
        ["ip", "-n", hosts.names[0], "-s", "-j", "link", "show", device],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


def paths(daemon):
    return {tuple(flow["path"]) for flow in daemon.ask("flows")["flows"]}


STRAIGHT, AROUND = {("h1->s1", "s1->h2")}, {("h1-right->s1", "s1->h2")}


def test_a_flow_is_counted_and_paced_on_the_nic_that_the_kernel_sends_it_by(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, TWO_NICS, mode="enforce", policy="static").start()
    training = Job(hosts, daemon.runtime_dir)
    training.until(training.is_paced)  # asked while it sends
    assert paths(daemon) == STRAIGHT
    assert daemon.ask("status")["machine"] == []

    rule = ("rule", "add", "from", "10.78.0.1", "lookup", "100")
    ip("-n", hosts.names[0], *rule)
    before = sent_by(hosts, "net1")
    training.until(lambda: training.is_paced(SLOW) and paths(daemon) == AROUND)
    assert sent_by(hosts, "net1") > before + SIZE, "so it is, not only so it is said"
    (said,) = daemon.ask("status")["machine"]
    told = (
        "flows from eth0 (10.78.0.1) leave by net1 (NIC right), so says the routing table; "
        "they are counted on h1-right->s1, not on h1->s1"
    )
    assert said == f"{told} ({FLOWS} now)"
    assert told in daemon.cli("status").stdout.replace("\n               ", " ")
    assert {flow["note"] for flow in daemon.ask("flows")["flows"]} == {"leaves by net1"}
    assert daemon.process.stderr.readline() == f"flowslotd: WARNING: {told}\n"

    ip("-n", hosts.names[0], *(part.replace("add", "del") for part in rule))
    training.until(lambda: paths(daemon) == STRAIGHT)
    training.until(lambda: not training.is_paced(SLOW) and training.is_paced())
    status = daemon.ask("status")
    assert (status["machine"], status["errors"]) == ([], {})
    assert status["flows"]["paced"] == FLOWS
    assert daemon.stop() == (0, ""), "said once"


def test_a_rule_by_a_sockets_mark_counts_for_that_socket_alone(hosts, tmp_path):
    daemon = Daemon(hosts, tmp_path, TWO_NICS, policy="static").start()
    training = Job(hosts, daemon.runtime_dir)
    training.until(lambda: paths(daemon) == STRAIGHT)
    ip("-n", hosts.names[0], "rule", "add", "fwmark", "7", "lookup", "100")
    marked = []

    def mark(sock):
        look(sock)  # of TCP, or it is none of the connections
        if not marked:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
            marked.append(sock.getsockname()[1])

    training.sockets(mark)

    def around():
        return [f["sport"] for f in daemon.ask("flows")["flows"] if f["path"][0] != "h1->s1"]

    training.until(lambda: around() == marked)


def test_a_device_that_the_topology_does_not_have_is_said_and_changes_nothing(hosts, tmp_path):
    ip("-n", hosts.names[0], "rule", "add", "from", "10.78.0.1", "lookup", "100")
    daemon = Daemon(hosts, tmp_path, policy="static").start()
    training = Job(hosts, daemon.runtime_dir)
    told = "flows from eth0 (10.78.0.1) leave by net1, which is no NIC of this host in the topology"
    training.until(lambda: told in "".join(daemon.ask("status")["machine"]))
    assert paths(daemon) == STRAIGHT
    settle(lambda: told in daemon.process.stderr.readline())
    run = subprocess.run(
        ["nsenter", f"--net=/run/netns/{hosts.names[0]}", str(PROGRAMS / "flowslot"), "preflight",
         str(daemon.file), "-o", "json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told in "".join(json.loads(run.stdout)["doubts"])
