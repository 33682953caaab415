/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl-harness - plays NCCL's part on a CPU: one rank of a job whose messages go by a network
 * plugin. Loads the plugin, walks its table as NCCL's service thread and progress thread do, and
 * prints one line of JSON. Exit status 0: everything was right; 1: something failed; 2: options.
 */
#include "rank.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static struct rank self;

/* A call that does not return can't be told otherwise. */
static void hung(int number) {
    char line[160];
    int i, n;
    (void)number;
    for (i = 0; i < CALLS; i++) {
        if (!self.inside[i]) continue;
        n = snprintf(line, sizeof(line), "{\"rank\":%d,\"ok\":false,\"hung\":\"%s\"}\n",
                     self.options.rank, call_names[i]);
        if (write(STDOUT_FILENO, line, (size_t)n) != n) break;
    }
    _exit(1);
}

static void *nothing(void *argument) {
    return argument;
}

/* A sanitizer starts a thread of its own beside the first: before anything is counted. */
static void start_first_thread(void) {
    pthread_t first;
    if (pthread_create(&first, NULL, nothing, NULL) == 0) pthread_join(first, NULL);
}

int main(int argc, char **argv) {
    pthread_condattr_t monotonic;
    int i;
    options_read(&self.options, argc, argv);
    pthread_mutex_init(&self.lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self.progress_ended, &monotonic);
    self.progressed = now_ns();
    self.sums_right = true;
    signal(SIGALRM, hung);
    if (!ring_prepare(&self)) {
        fprintf(stderr, "nccl-harness: --bytes, --slice, --outstanding: more than memory holds\n");
        return 2;
    }
    if (!rendezvous_open(&self.meeting, self.options.root, self.options.rank, self.options.ranks,
                         self.options.limit_s)) {
        fprintf(stderr, "nccl-harness: --root: nobody could be met at %s\n", self.options.root);
        return 2;
    }
    start_first_thread();
    self.before = census_take();
    for (i = 0; i < self.options.rounds; i++) {
        alarm((unsigned)self.options.limit_s + 5);
        if (!service_round(&self)) break;
    }
    alarm(0);
    report_print(&self);
    rendezvous_close(&self.meeting);
    ring_release(&self);
    return self.failed ? 1 : 0;
}
