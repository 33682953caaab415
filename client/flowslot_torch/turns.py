# SPDX-License-Identifier: Apache-2.0
"""One thread at a time communicates: one made for it, or the one that trains, where this one would
have to wait for the other anyway. For on a busy processor, who is woken comes milliseconds late.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable


class Turns:
    """`error`: what ended it all."""

    def __init__(
        self,
        wait: Callable[[], None],
        act: Callable[[], None],
        wake: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """`wait`: until there may be something to do, or there is an `error`; `wake`: who waits so.
        `act`: do it. `end`: clean up after an error; on the thread made for it."""
        self.error: BaseException | None = None
        self._wait, self._act, self._wake, self._end = wait, act, wake, end
        self._turn = threading.Lock()
        self._acting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="flowslot-tasks", daemon=True)

    def start(self) -> None:
        """The thread."""
        self._thread.start()

    def check(self) -> None:
        """Raise `error`."""
        if self.error is not None:
            raise self.error

    def take(self, wanted: Callable[[], bool]) -> bool:
        """The calling thread takes a turn, if nobody has it and there is what is `wanted`; whether
        it did. Raises what the turn does: that ends all."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self.error is not None or not wanted():
                return False
            self._take()
        except BaseException as error:
            interrupted = RuntimeError(f"the communication was interrupted: {error!r}")
            self.error = self.error or (error if isinstance(error, Exception) else interrupted)
            self._wake()
            raise
        finally:
            self._turn.release()
        return True

    def is_mine(self) -> bool:
        """Whether the calling thread is in a turn: an event, or a signal's handler."""
        return threading.current_thread() is self._acting

    def join(self, longest_s: float) -> None:
        """Until the thread has ended, unless that waits for the calling one."""
        if threading.current_thread() is not self._thread and not self.is_mine():
            self._thread.join(longest_s)

    def _take(self) -> None:
        self._acting = threading.current_thread()
        try:
            self._act()
        finally:
            self._acting = None

    def _run(self) -> None:
        while self.error is None:
            self._wait()
            with self._turn:
                try:
                    self.check()
                    self._take()
                except BaseException as error:
                    self.error = self.error or error
        for one in (self.error, self.error.__context__):  # what they hold keeps connections open
            traceback.clear_frames(one.__traceback__ if one is not None else None)
        self._end()
