/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What threads of one process do to the profiler at the same time: communicators come and go, each
 * with collectives, operations and steps, between calls with handles that nobody gave out, or that
 * another thread has, or had before its communicator ended. Built with the profiler's sources, and a
 * sanitizer.
 */
#include "profiler.h"

#include <stdint.h>

#define THREADS 4

extern const struct profiler ncclProfiler_v6;

static int mask;
static void *latest; /* a collective of any thread */

static void *start(void *context, void *parent, struct event_5 event) {
    void *handle = NULL;
    event.head.parent = parent;
    ncclProfiler_v6.start(context, &handle, &event);
    return handle;
}

static void collective(void *context, uintptr_t buffer, uintptr_t stray) {
    struct event_5 collective = {.head.kind = KIND_COLLECTIVE}, step = {.head.kind = KIND_PROXY_STEP};
    struct event_5 operation = {.head.kind = KIND_PROXY_OP};
    struct state_args bytes = {1000};
    void *parent, *op, *one;
    collective.collective.function = "AllReduce";
    collective.collective.type = "ncclFloat32";
    collective.collective.count = 100000;
    collective.collective.from = (void *)buffer;
    parent = start(context, NULL, collective);
    ncclProfiler_v6.stop(parent);
    __atomic_store_n(&latest, parent, __ATOMIC_RELAXED);
    operation.op = (struct proxy_op){.pid = getpid(), .steps = 3, .chunk = 1000, .sends = 1};
    op = start(context, parent, operation);
    for (int i = 0; i < 3; i++) {
        one = start(context, op, step);
        ncclProfiler_v6.record(one, STATE_STEP_SENT, &bytes);
        ncclProfiler_v6.stop(one);
        ncclProfiler_v6.stop((void *)stray);
        ncclProfiler_v6.record((void *)(stray * 3), i, &bytes);
        ncclProfiler_v6.record(__atomic_load_n(&latest, __ATOMIC_RELAXED), i, &bytes);
        ncclProfiler_v6.stop(__atomic_load_n(&latest, __ATOMIC_RELAXED));
        start((void *)stray, (void *)stray, step);
    }
    ncclProfiler_v6.stop(op);
}

static void *play(void *which) {
    uintptr_t me = (uintptr_t)which;
    for (uintptr_t round = 0; round < 20; round++) {
        void *context = NULL;
        ((init_5)(void *)ncclProfiler_v6.init)(&context, 100 + me % 2, &mask, "c", 2, 4, (int)me, NULL);
        for (uintptr_t i = 0; i < 50; i++) collective(context, me * 100 + i % 10, ((me + 1) << 60) + i * round);
        ncclProfiler_v6.finalize(context);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, play, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    return 0;
}
