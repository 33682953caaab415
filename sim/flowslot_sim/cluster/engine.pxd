# SPDX-License-Identifier: Apache-2.0
# Types of engine.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from flowslot_sim.cluster.sharing cimport Sharing

cdef int64_t _never
cdef double _second, _rounding, _forever
cdef Py_ssize_t _idle, _wants, _computes, _waits, _sends

cdef class Engine:
    cdef readonly Sharing sharing
    cdef readonly object gate, transfers
    cdef public object log
    cdef readonly int64_t tick, latency, now
    cdef readonly bint recount
    cdef readonly bint changed
    cdef readonly int64_t[:, ::1] compute
    cdef readonly double[:, ::1] volume, stretch
    cdef readonly Py_ssize_t[::1] phases, first, job_of, members
    cdef readonly int64_t[::1] iterations
    cdef readonly int32_t[:, ::1] paths, flows
    cdef readonly double[::1] size, left, rate, carried
    cdef readonly uint8_t[::1] sends, alone, is_free
    cdef readonly Py_ssize_t[::1] ready, asked, arrived, finished
    cdef readonly int64_t[::1] service, since, due, done, onset, period
    cdef readonly int64_t[:, ::1] ends
    cdef readonly Py_ssize_t ready_count, finished_count, free_count
    cdef readonly Py_ssize_t[::1] state, phase, gpu_of, next_on, head, runs, free
    cdef readonly int64_t[::1] gpu_due, busy, began

    @cython.locals(w=Py_ssize_t, g=Py_ssize_t)
    cpdef place(self, Py_ssize_t i, const Py_ssize_t[::1] gpus, const int32_t[::1] path, const int32_t[::1] flows)
    cpdef void share_anew(self)
    @cython.locals(then=int64_t)
    cpdef Py_ssize_t run(self, int64_t until) except -1
    @cython.locals(first=int64_t)
    cpdef int64_t next_event(self)
    cdef int start_transfers(self) except -1
    cdef int tell(self, Py_ssize_t i, Py_ssize_t state) except -1
    @cython.locals(sent=double)
    cdef void settle(self, Py_ssize_t i)
    cdef void count(self, Py_ssize_t i, double sent)
    @cython.locals(rate=double, end=int64_t)
    cdef void retime(self, Py_ssize_t i)
    cdef void start_computing(self)
    @cython.locals(best=Py_ssize_t, w=Py_ssize_t)
    cdef Py_ssize_t most_urgent(self, Py_ssize_t g)
    @cython.locals(less=cython.bint, equal=cython.bint, first=cython.bint)
    cdef bint sooner(self, Py_ssize_t w, Py_ssize_t v)
    @cython.locals(factor=double)
    cdef void begin(self, Py_ssize_t g, Py_ssize_t w)
    @cython.locals(at=Py_ssize_t, k=Py_ssize_t)
    cdef int end_transfers(self) except -1
    @cython.locals(w=Py_ssize_t)
    cdef int end_computing(self) except -1
    cdef int meet(self, Py_ssize_t i, Py_ssize_t p) except -1
    @cython.locals(p=Py_ssize_t)
    cdef next_phase(self, Py_ssize_t i)
    cdef void want(self, Py_ssize_t w)
    cdef void release(self, Py_ssize_t g)
    @cython.locals(v=Py_ssize_t, g=Py_ssize_t)
    cdef int finish(self, Py_ssize_t i) except -1

@cython.locals(whole=int64_t)
cdef int64_t round_up(double ns)
