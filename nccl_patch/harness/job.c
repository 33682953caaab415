/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnccl-job.so - a rank as a library, for a process that computes between its all-reduces and
 * says when: the lab's jobs. One rank per process, one thread calls.
 */
#include "rank.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORTED __attribute__((visibility("default")))
enum { POINTS = 1 << 16 };

static struct rank self;
static void (*tell_iteration)(uint64_t);

/* The first call: takes the harness's options. 0: this rank is connected to its neighbours;
 * 1: failed, see nccl_job_error; 2: nobody could be met. */
EXPORTED int nccl_job_open(int argc, char **argv) {
    const struct options *o = &self.options;
    pthread_mutex_init(&self.lock, NULL);
    options_read(&self.options, argc, argv);
    self.progressed = now_ns();
    self.room = POINTS;
    self.trace = malloc(self.room * sizeof(*self.trace));
    if (!ring_prepare(&self)) {
        fail(&self, OTHER, NET_OK, "--bytes, --slice, --outstanding: more than memory holds");
        return 1;
    }
    if (!rendezvous_open(&self.meeting, o->root, o->rank, o->ranks, o->limit_s)) return 2;
    if (!service_open(&self)) return 1;
    return 0;
}

/* As a program calls it through its plugin, before each of its iterations. -1: there is none. */
EXPORTED int nccl_job_tell(uint64_t iteration) {
    if (tell_iteration == NULL)
        *(void **)&tell_iteration = dlsym(self.net.library, "flowslot_iteration");
    if (tell_iteration == NULL) return -1;
    tell_iteration(iteration);
    return 0;
}

/* What this rank puts in. */
EXPORTED void nccl_job_fill(int iteration) {
    ring_fill(&self, iteration);
}

/* 0: done; 1: failed. */
EXPORTED int nccl_job_all_reduce(void) {
    self.points = 0;
    iterate(&self);
    return self.failed ? 1 : 0;
}

/* Bytes received in all all-reduces so far; -1: this one's sums are wrong. */
EXPORTED int64_t nccl_job_verify(int iteration) {
    int64_t received = 0;
    int c;
    if (!ring_right(&self, iteration)) return -1;
    for (c = 0; c < self.options.channels; c++) received += (int64_t)self.channels[c].in.bytes;
    return received;
}

/* Of the last all-reduce: (monotonic ns, bytes received in it), as they came. How many; they are
 * told once. */
EXPORTED size_t nccl_job_trace(const struct point **points) {
    size_t count = self.points;
    *points = self.trace;
    self.points = 0;
    return count;
}

/* What failed first, in one line. */
EXPORTED const char *nccl_job_error(void) {
    static char line[256];
    const struct failure *first = &self.error[0];
    if (self.errors == 0) return "nothing";
    snprintf(line, sizeof(line), "%s: %s (result %d)", call_names[first->call],
             first->what == NULL ? "an error" : first->what, first->result);
    return line;
}
