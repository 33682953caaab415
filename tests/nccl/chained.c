/* SPDX-License-Identifier: Apache-2.0 */
/* Another profiler, of version VERSION: writes what it hears to $CHAINED, one line a call. Its handles
 * count from 1001 on; with $CHAINED_FAILS init fails. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *to;
static int *mask;
static uintptr_t last = 1000;

static int init(void **context, int *asked) {
    to = fopen(getenv("CHAINED"), "a");
    setvbuf(to, NULL, _IOLBF, 0);
    *context = &last;
    *asked = VERSION >= 5 ? 0x21f : 0x1f;
    mask = asked;
    fprintf(to, "init\n");
    return getenv("CHAINED_FAILS") != NULL ? 3 : 0;
}
static int init_5(void **context, uint64_t comm, int *asked) {
    int failed = init(context, asked);
    fprintf(to, "comm %llu\n", (unsigned long long)comm);
    return failed;
}
static int start(void *context, void **handle, void *event) {
    int kind = VERSION >= 5 ? (int)*(uint64_t *)event : *(uint8_t *)event;
    *handle = (void *)++last;
    fprintf(to, "start %d parent %zu as %zu%s\n", kind, (size_t)((void **)event)[1], (size_t)last,
            context == &last ? "" : " elsewhere");
    return 0;
}
static int stop(void *handle) { return fprintf(to, "stop %zu\n", (size_t)handle) < 0; }
static int record(void *handle, int state, size_t *args) {
    return fprintf(to, "state %d of %zu: %zu\n", state, (size_t)handle, args[0]) < 0;
}
static int finalize(void *context) {
    (void)context;
    *mask = 0;
    return fprintf(to, "finalize\n") < 0;
}

#define JOINED(a, b) a##b
#define NAMED(version) JOINED(ncclProfiler_v, version)
struct {
    const char *name;
    void *init;
    int (*start)(void *, void **, void *);
    int (*stop)(void *);
    int (*record)(void *, int, size_t *);
    int (*finalize)(void *);
} NAMED(VERSION) = {"chained", VERSION >= 5 ? (void *)init_5 : (void *)init,
                    start, stop, record, finalize};
