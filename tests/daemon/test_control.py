# SPDX-License-Identifier: Apache-2.0
"""The control socket: what it answers, what it refuses, and whom."""

import asyncio
import json
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowslot.model.errors import ConfigError
from flowslot_proto.control import Control, named


async def talk(path, *lines):
    reader, writer = await asyncio.open_unix_connection(path)
    answers = []
    for line in lines:
        writer.write(line)
        await writer.drain()
        answer = await asyncio.wait_for(reader.readline(), 5)
        answers.append(json.loads(answer) if answer else None)
    writer.close()
    return answers


@asynccontextmanager
async def serving(path, **handlers):
    """A control server; the bugs that it tells of."""
    bugs = []
    readers = {"status": lambda: {"pid": 1}, **handlers}
    writers = {"reload": lambda: {"done": True}}
    control = Control(
        path,
        readers,
        writers,
        lambda kind, error: bugs.append(kind),
        {"set-policy": named(lambda name: {"policy": name})},
    )
    await control.start()
    try:
        yield bugs
    finally:
        await control.stop()


async def test_control_answers_and_refuses_in_one_line_each(tmp_path):
    path = tmp_path / "control.sock"

    async def late():
        await asyncio.sleep(0)
        return {"late": True}

    def wrong():
        raise ConfigError("f.toml", "mode", "must be x")

    def broken():
        raise ZeroDivisionError("oops")

    async with serving(path, late=late, wrong=wrong, broken=broken) as bugs:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        names = ("status", "late", "reload", "wrong", "broken", "nonsense")
        lines = [json.dumps({"cmd": name}).encode() + b"\n" for name in names]
        garbage = (b"\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b"[" * 4000 + b"\n")
        answers = await talk(path, *lines, *garbage)
    assert answers[:3] == [
        {"ok": True, "result": {"pid": 1}},
        {"ok": True, "result": {"late": True}},
        {"ok": True, "result": {"done": True}},
    ]
    assert [a["kind"] for a in answers[3:]] == ["config", "internal"] + ["request"] * 6
    assert answers[3]["error"] == "f.toml: field `mode`: must be x"
    known = "status, late, wrong, broken, reload, set-policy"
    assert answers[5]["error"] == f"unknown command 'nonsense'; known: {known}"
    assert bugs == ["control command broken"]
    assert not path.exists()


async def test_what_takes_a_name_gets_one(tmp_path):
    path = tmp_path / "control.sock"
    good = b'{"cmd": "set-policy", "name": "fair"}\n'
    names = (b"", b"7", b'""', b'"a\\nb"', b'["fair"]', b'"' + b"x" * 65 + b'"')
    bad = [b'{"cmd": "set-policy"' + (b', "name": ' + n if n else b"") + b"}\n" for n in names]
    async with serving(path) as bugs:
        answers = await talk(path, good, *bad)
    assert answers[0] == {"ok": True, "result": {"policy": "fair"}}
    problem = "set-policy: field `name`: must have 1 to 64 printable characters"
    assert answers[1:] == [{"ok": False, "kind": "config", "error": problem}] * len(bad)
    assert bugs == []


async def test_control_survives_long_lines_and_clients_that_vanish(tmp_path):
    path = tmp_path / "control.sock"
    async with serving(path) as bugs:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * 100_000)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        for _ in range(100):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b'{"cmd": "status"}\n')
            writer.close()
        assert await talk(path, b'{"cmd": "status"}\n') == [{"ok": True, "result": {"pid": 1}}]
    assert bugs == []


@pytest.mark.root
async def test_only_root_and_the_daemons_user_may_change_it(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    path = tmp_path / "control.sock"
    code = (
        "import os,socket,sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); f=s.makefile('rwb')\n"
        'for c in (b\'{"cmd":"status"}\\n\', b\'{"cmd":"reload"}\\n\','
        ' b\'{"cmd":"set-policy","name":"fair"}\\n\'):\n'
        "  f.write(c); f.flush(); sys.stdout.write(f.readline().decode())\n"
    )
    async with serving(path):
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(path), stdout=subprocess.PIPE
        )
        out, _ = await run.communicate()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["ok"] for a in answers] == [True, False, False]
    assert answers[1]["kind"] == answers[2]["kind"] == "permission"
