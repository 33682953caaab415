# SPDX-License-Identifier: Apache-2.0
import pytest

from flowslot_proto.endpoints import is_loopback, why_only_here


@pytest.mark.parametrize(
    ("endpoint", "addresses", "only_here"),
    [
        ("node7:7401", ["127.0.1.1"], True),
        ("node7:7401", ["::1", "127.0.0.1"], True),
        ("node7:7401", ["127.0.1.1", "192.0.2.7"], False),
        ("node7:7401", ["fe80::1%eth0"], False),
        ("node7:7401", [], False),
        ("localhost:7401", ["127.0.0.1"], False),  # meant so
        ("127.0.0.1:7401", ["127.0.0.1"], False),
        ("[::1]:7401", ["::1"], False),
    ],
)
def test_a_name_that_only_this_machine_has(
    endpoint: str, addresses: list[str], only_here: bool
) -> None:
    why = why_only_here(endpoint, addresses)
    assert bool(why) == only_here
    if only_here:
        assert f"node7 is {', '.join(addresses)} on this machine" in why


def test_loopback_is_what_is_surely_on_this_machine() -> None:
    for endpoint in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        assert is_loopback(endpoint)
    for endpoint in ("192.0.2.1:1", "[2001:db8::1]:1", "node7:1", "127.example.net:1"):
        assert not is_loopback(endpoint)
