# SPDX-License-Identifier: Apache-2.0
"""Many runs, on all processors or a Ray cluster, each kept in a file as it ends.

A point is what a run is given: a frozen dataclass, whose first field is a str, with a method
`figures` that does the run and returns a TypedDict. A line of the file is both, as JSON. Whoever
begins again does what is not there yet.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

from flowslot.model.errors import ConfigError, FlowslotError

Line = dict[str, Any]
AT_ONCE = 1000
"""Runs that a Ray cluster is told of before one of them ends."""


class Point(Protocol):
    """See above. FlowslotError when it is made: a field is out of range."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def figures(self) -> Mapping[str, Any]:
        """Do the run; what came out."""
        ...


P = TypeVar("P", bound=Point)


def fits(value: object, kind: Any) -> bool:
    """Whether a value from JSON is a `float`, `list[float]`, `dict[str, float]` and the like."""
    parts = get_args(kind)
    if type(value) is not (get_origin(kind) or kind):
        return False
    if isinstance(value, dict):
        return all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    return not isinstance(value, list) or all(fits(each, parts[0]) for each in value)


class Journal(Generic[P]):
    """The runs that have ended, in a file. `kind`: of points; `found`: of figures. What was being
    written when the runs were killed is taken away. ConfigError: a line is not such a run; somebody
    else writes the file."""

    def __init__(self, path: Path, kind: type[P], found: type[Any]) -> None:
        self.done: dict[P, Line] = {}
        self._kind, self._given = kind, list(kind.__dataclass_fields__)
        hints = get_type_hints(kind)
        self._columns = {name: hints[name] for name in self._given} | get_type_hints(found)
        begins = f'{{"{self._given[0]}": "'.encode()
        try:
            self._file = path.open("a+b")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            whole = self._file.read()
            kept = whole[: whole.rfind(b"\n") + 1]
            lines, rest = kept.split(b"\n")[:-1], whole[len(kept) :]
            if rest[: len(begins)] != begins[: len(rest)]:
                lines.append(rest)  # whose it is nobody knows
            for number, text in enumerate(lines, 1):
                self._read(path, number, text)
            self._file.truncate(len(kept))
        except BlockingIOError:
            raise ConfigError(str(path), "", "another sweep writes this file") from None
        except OSError as error:
            raise ConfigError(str(path), "", error.strerror or str(error)) from None

    def _read(self, path: Path, number: int, text: bytes) -> None:
        try:
            read = json.loads(text)
            line = {name: read[name] for name in self._columns}
            if not all(fits(line[name], kind) for name, kind in self._columns.items()):
                raise ValueError
            ended = self._point(line)
        except (ValueError, TypeError, KeyError, RecursionError, FlowslotError):
            problem = f"line {number} is no run of a sweep: name another file, or remove the line"
            raise ConfigError(str(path), "", problem) from None
        self.done[ended] = line

    def _point(self, line: Line) -> P:
        make: Any = self._kind
        point: P = make(**{name: line[name] for name in self._given})
        return point

    def add(self, line: Line) -> None:
        """On disk before this returns."""
        self.done[self._point(line)] = line
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more runs."""
        self._file.close()

    def recorded(self, runs: Iterable[Line]) -> Iterator[Line]:
        """Runs as they end, those that did not fail in the file. FlowslotError, after the last:
        some failed."""
        failed = []
        for line in runs:
            if "error" in line:
                failed.append(line)
            else:
                self.add(line)
            yield line
        if failed:
            point = ", ".join(f"{name}={failed[0][name]}" for name in self._given)
            raise FlowslotError(
                f"{len(failed)} runs failed, the others are kept; {point}: {failed[0]['error']}"
            )


def one(point: Point) -> Line:
    """Do a run: what it was, and what came out; `error`, if it failed."""
    try:
        return {**asdict(point), **point.figures()}
    except Exception as error:  # the other runs go on, whatever it was
        return {**asdict(point), "error": f"{type(error).__name__}: {error}"}


def die_with_parent() -> None:
    """A worker of a sweep that is killed ends as well."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def here(todo: Sequence[Point], processes: int) -> Iterator[Line]:
    """By so many processes, as the runs end. FlowslotError: one of these was killed."""
    pool = ProcessPoolExecutor(processes, initializer=die_with_parent)
    try:
        for ended in as_completed([pool.submit(one, point) for point in todo]):
            yield ended.result()
    except BrokenProcessPool:
        problem = "a process was killed: is there memory for so many? Runs that ended are kept"
        raise FlowslotError(f"--processes {processes}: {problem}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def on_ray(todo: Sequence[Point], address: str) -> Iterator[Line]:
    """By a Ray cluster, AT_ONCE at a time. ConfigError: Ray is not installed, or cannot be reached.
    FlowslotError: it failed, or its machines have no flowslot."""
    try:
        ray = import_module("ray")
    except ImportError:
        problem = "needs the package `ray`: pip install flowslot[ray]"
        raise ConfigError("--ray", "", problem) from None
    try:
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError("--ray", "", f"{address}: {why}; name HOST:PORT, or local") from None
    try:
        do, coming = ray.remote(one).remote, iter(todo)
        waiting: list[Any] = []
        while waiting := waiting + [do(each) for each in islice(coming, AT_ONCE - len(waiting))]:
            ended, waiting = ray.wait(waiting)
            yield from ray.get(ended)
    except ray.exceptions.RayError as error:
        why = str(error).strip().rpartition("\n")[2]
        told = f"a run failed there; each of its machines needs this flowslot. It said: {why}"
        raise FlowslotError(f"--ray {address}: {told}. Runs that ended are kept") from None
    finally:
        ray.shutdown()
