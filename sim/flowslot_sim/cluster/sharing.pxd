# SPDX-License-Identifier: Apache-2.0
# Types of sharing.py, for the compiler, which infers those of variables that are not named here.
cimport cython
from libc.stdint cimport int32_t, uint8_t

cdef double _inf, _eps

cdef class Sharing:
    cdef readonly int32_t[:, ::1] paths, flows
    cdef readonly Py_ssize_t links, n
    cdef readonly Py_ssize_t[::1] live, place, touched
    cdef readonly double[::1] rate
    cpdef void enter(self, Py_ssize_t i)
    cpdef void leave(self, Py_ssize_t i)
    cpdef Py_ssize_t share(self)

cdef class Contended(Sharing):
    cdef readonly double b, eta
    cdef Py_ssize_t[::1] count
    cpdef void enter(self, Py_ssize_t i)
    cpdef void leave(self, Py_ssize_t i)
    @cython.locals(k=Py_ssize_t)
    cpdef Py_ssize_t share(self)

cdef class MaxMin(Sharing):
    cdef readonly double[::1] capacity, base, extra
    cdef readonly bint roughly
    cdef Py_ssize_t[::1] head, after, before, suspects, touches, crossed, witness, only, heap
    cdef Py_ssize_t shift, mask, suspect_count, touch_count, crossed_count, anew, heap_count
    cdef uint8_t[::1] is_suspect, is_touched, seen, among, settled
    cdef double[::1] room, users, key
    @cython.locals(e=Py_ssize_t)
    cpdef void enter(self, Py_ssize_t i)
    @cython.locals(e=Py_ssize_t)
    cpdef void leave(self, Py_ssize_t i)
    cpdef void reserve(self, Py_ssize_t i, double rate)
    cpdef void refresh(self)
    cdef void touch(self, Py_ssize_t link)
    cdef void suspect(self, Py_ssize_t link)
    @cython.locals(done=Py_ssize_t)
    cpdef Py_ssize_t share(self)
    @cython.locals(e=Py_ssize_t, i=Py_ssize_t)
    cdef void collect(self, Py_ssize_t link, bint every)
    @cython.locals(share=double)
    cdef void solve(self)
    @cython.locals(e=Py_ssize_t, i=Py_ssize_t, room=double, users=double, rows=Py_ssize_t, mine=Py_ssize_t)
    cdef void open(self, Py_ssize_t link)
    @cython.locals(at=Py_ssize_t)
    cdef void push(self, Py_ssize_t link)
    cdef double per_flow(self, Py_ssize_t link)
    @cython.locals(child=Py_ssize_t, right=Py_ssize_t)
    cdef void sift(self, Py_ssize_t at)
    @cython.locals(e=Py_ssize_t, i=Py_ssize_t)
    cdef void fill(self, Py_ssize_t link, double share)
    @cython.locals(
        e=Py_ssize_t, i=Py_ssize_t, load=double, mine=double, theirs=double, extra=double,
        my_least=double, their_least=double, much=double, lost=cython.bint,
    )
    cdef void check(self, Py_ssize_t link)
