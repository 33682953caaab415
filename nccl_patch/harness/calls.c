/* SPDX-License-Identifier: Apache-2.0 */
/* Around the plugin's calls: clocks, counts, errors, and the fault that a rank plays. */
#include "rank.h"

#include <signal.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static int64_t read_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

int64_t now_ns(void) {
    return read_clock(CLOCK_MONOTONIC);
}

int64_t cpu_ns(void) {
    return read_clock(CLOCK_PROCESS_CPUTIME_ID);
}

void fail(struct rank *rank, enum call call, int result, const char *what) {
    int64_t now = now_ns();
    pthread_mutex_lock(&rank->lock);
    if (rank->errors < MOST_ERRORS) {
        struct failure *one = &rank->error[rank->errors];
        one->call = call;
        one->result = result;
        one->what = what;
        one->at = now;
        one->call_ns = rank->began[call] == 0 ? 0 : now - rank->began[call];
        one->since_progress_ns = now - rank->progressed;
    }
    rank->errors++;
    rank->failed = true;
    pthread_mutex_unlock(&rank->lock);
}

/* Says when and where, then dies or stops, on the spot and as a whole. */
static void play_fault(struct rank *rank) {
    char line[160];
    int n = snprintf(line, sizeof(line), "{\"rank\":%d,\"fault\":\"%s\",\"at\":%.6f}\n",
                     rank->options.rank, call_names[rank->options.fault], (double)now_ns() / 1e9);
    if (write(STDOUT_FILENO, line, (size_t)n) != n) _exit(1);
    kill(getpid(), rank->options.stall ? SIGSTOP : SIGKILL);
}

void fault_now(struct rank *rank, enum call call) {
    if (rank->options.fault == call) play_fault(rank);
}

void call_begin(struct rank *rank, enum call call) {
    rank->began[call] = now_ns();
    rank->inside[call] = true;
}

int call_end(struct rank *rank, enum call call, int result) {
    int64_t took = now_ns() - rank->began[call];
    uint64_t calls = ++rank->calls[call];
    rank->inside[call] = false;
    if (took > rank->slowest[call]) rank->slowest[call] = took;
    if (result != NET_OK) fail(rank, call, result, NULL);
    if (call == rank->options.fault && calls == rank->options.fault_after && call != LISTEN &&
        call != CLOSE)
        play_fault(rank);
    /* To close in the middle of a transfer, the rank gives up first. */
    if (rank->options.fault == CLOSE && !rank->failed && call == TEST &&
        calls == rank->options.fault_after)
        fail(rank, OTHER, NET_OK, "leaves, to be killed after its first close");
    if (rank->options.fault == CLOSE && rank->failed && call == CLOSE) play_fault(rank);
    return result;
}
