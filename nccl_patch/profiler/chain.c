/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chain.c - the profiler that $FLOWSLOT_NCCL_PROFILER names hears all events, too: NCCL loads one
 * profiler only. It has to export the version that NCCL speaks with us (v5 does for v6, which only
 * adds kinds of events). Without it, or if it refuses, everything else goes on.
 */
#include "profiler.h"

#include <dlfcn.h>

extern const struct profiler ncclProfiler_v6;

#define SINCE_V6 (7 << 12) /* kinds of events */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool looked;
static int spoken; /* the version that it exports */
static struct profiler *other;
static int mask;

static struct profiler *load(const char *path, int version) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    struct profiler *found = NULL;
    char symbol[32];
    if (library == NULL) {
        fprintf(stderr, "flowslot: FLOWSLOT_NCCL_PROFILER: %s\n", dlerror());
        return NULL;
    }
    for (spoken = version; found == NULL && spoken >= version - (version == 6); spoken--) {
        snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", spoken);
        found = dlsym(library, symbol);
    }
    spoken++;
    if (found != NULL && dlsym(library, "ncclProfiler_v6") != &ncclProfiler_v6) return found;
    fprintf(stderr, found == NULL ? "flowslot: FLOWSLOT_NCCL_PROFILER: %s has no ncclProfiler_v%d, "
                                    "which this NCCL speaks\n"
                                  : "flowslot: FLOWSLOT_NCCL_PROFILER: %s is flowslot's own: name the "
                                    "other profiler (v%d)\n",
            path, version);
    dlclose(library);
    return NULL;
}

struct profiler *chain_get(int version) {
    pthread_mutex_lock(&lock);
    if (!looked) { /* once: another thread may change the environment later */
        const char *path = getenv("FLOWSLOT_NCCL_PROFILER");
        if (path != NULL && path[0] != '\0') other = load(path, version);
        looked = true;
    }
    pthread_mutex_unlock(&lock);
    return other;
}

int chain_mask(void) {
    return __atomic_load_n(&mask, __ATOMIC_RELAXED) & (spoken == 5 ? ~SINCE_V6 : ~0);
}

int *chain_mask_at(void) {
    return &mask;
}

/* With its own handles in the places of ours. */
void chain_start(struct comm *comm, void *handle, const struct event *event, const void *from) {
    union {
        struct event_1 v1;
        struct event_2 v2;
        struct event_5 v5;
    } copy;
    void *theirs = NULL;
    memcpy(&copy, from, event_size[comm->version]);
    copy.v1.head.parent = account_find_theirs(event->parent);
    if (comm->version >= 5 && event->kind == KIND_COLLECTIVE)
        copy.v5.collective.group = account_find_theirs(copy.v5.collective.group);
    if (comm->version >= 5 && event->kind == KIND_P2P)
        copy.v5.p2p.group = account_find_theirs(copy.v5.p2p.group);
    if (other->start(comm->theirs, &theirs, &copy) == 0) account_theirs(handle, theirs);
}

/* By its handle alone: the communicator of a handle that NCCL no longer has may be another's by now. */
void chain_stop(void *theirs) {
    (void)other->stop(theirs);
}

void chain_record(void *theirs, int state, struct state_args *args) {
    (void)other->record(theirs, state, args);
}
