/* SPDX-License-Identifier: Apache-2.0 */
/* The progress thread: isend, irecv and test of all channels in turn, as NCCL's proxy does. */
#include "rank.h"

#include <sched.h>
#include <string.h>
#include <time.h>

static void sleep_ns(int64_t ns) {
    struct timespec pause = {ns / 1000000000, ns % 1000000000};
    nanosleep(&pause, NULL);
}

/* What NCCL may leave out, left out in every other request. */
static void *region_of(const struct rank *rank, const struct way *way, uint64_t q) {
    return rank->options.null_handles && q % 2 ? NULL : way->region;
}

/* True: something was posted. */
static bool post_sends(struct rank *rank, struct channel *channel) {
    struct way *out = &channel->out;
    uint64_t window = (uint64_t)rank->options.outstanding, first = out->posted;
    while (out->posted < out->total && out->posted - out->finished < window &&
           ring_ready(rank, channel, out->posted)) {
        uint64_t q = out->posted;
        uint8_t *slot = out->fifo + q % window * rank->options.slice;
        uint64_t size = ring_size_sent(rank, channel, q);
        void *request = NULL;
        if (out->staged == q) {
            ring_stage(rank, channel, q, slot);
            out->staged++;
        }
        if (CALL(rank, ISEND,
                 net_isend(&rank->net, out->comm, slot, size, rank->options.rank,
                           region_of(rank, out, q), NULL, &request)) != NET_OK ||
            request == NULL)
            break; /* later */
        out->requests[q % window] = request;
        out->posted++;
    }
    return out->posted != first;
}

/* Receives are posted as large as a slot, whatever is to come. */
static bool post_receives(struct rank *rank, struct channel *channel) {
    struct way *in = &channel->in;
    uint64_t window = (uint64_t)rank->options.outstanding, first = in->posted;
    while (in->posted < in->total && in->posted - in->finished < window) {
        uint64_t q = in->posted;
        uint8_t *slot = in->fifo + q % window * rank->options.slice;
        bool optional = rank->net.version >= 9 && q % 2 == 1;
        void *request = optional ? (void *)(intptr_t)NET_OPTIONAL : NULL;
        void *parent = NULL, **parents = rank->options.null_handles && q % 2 ? NULL : &parent;
        if (CALL(rank, IRECV,
                 net_irecv(&rank->net, in->comm, slot, rank->options.slice, channel->before,
                           region_of(rank, in, q), parents, &request)) != NET_OK ||
            request == NULL)
            break;
        if (request == (void *)(intptr_t)NET_OPTIONAL) {
            fail(rank, IRECV, NET_OK, "left *request at 1");
            break;
        }
        in->requests[q % window] = request;
        in->posted++;
    }
    return in->posted != first;
}

/* Tests the oldest request of a direction, as NCCL does. True: it is done, of *size bytes, or of
 * an unchanged *size where none was asked for. */
static bool oldest_done(struct rank *rank, struct way *way, int *size) {
    uint64_t q = way->finished;
    int done = 0;
    if (q == way->posted) return false;
    if (CALL(rank, TEST,
             rank->net.table->test(way->requests[q % (uint64_t)rank->options.outstanding], &done,
                                   q % 4 == 3 ? NULL : size)) != NET_OK)
        return false;
    if (done) atomic_store(&rank->progressed, now_ns());
    return done != 0;
}

static bool finish_sends(struct rank *rank, struct channel *channel) {
    struct way *out = &channel->out;
    uint64_t first = out->finished;
    int size;
    while (!rank->failed && oldest_done(rank, out, &size)) {
        uint64_t q = out->finished;
        uint8_t *slot = out->fifo + q % (uint64_t)rank->options.outstanding * rank->options.slice;
        uint64_t sent = ring_size_sent(rank, channel, q);
        memset(slot, 0xDD, sent < 64 ? sent : 64); /* ours again: a plugin that reads on is wrong */
        out->bytes += sent;
        out->seen++;
        out->finished++;
    }
    return out->finished != first;
}

static void note_received(struct rank *rank, uint64_t bytes) {
    int64_t before = rank->points == 0 ? 0 : rank->trace[rank->points - 1].bytes;
    if (rank->trace == NULL || rank->points == rank->room) return;
    rank->trace[rank->points++] = (struct point){now_ns(), before + (int64_t)bytes};
}

static bool finish_receives(struct rank *rank, struct channel *channel) {
    struct way *in = &channel->in;
    uint64_t first = in->finished;
    int size = -1;
    while (!rank->failed && oldest_done(rank, in, &size)) {
        uint64_t q = in->finished, wanted = ring_size(rank, channel, q);
        if (size != -1 && (uint64_t)size != wanted)
            fail(rank, TEST, NET_OK, "another size than was sent");
        if (!ring_consume(rank, channel, q,
                          in->fifo + q % (uint64_t)rank->options.outstanding * rank->options.slice))
            fail(rank, TEST, NET_OK, "another slice than was to come");
        CALL(rank, OTHER,
             net_consumed(&rank->net, in->comm,
                          in->requests[q % (uint64_t)rank->options.outstanding]));
        in->bytes += wanted;
        note_received(rank, wanted);
        in->seen++;
        in->finished++;
        size = -1;
    }
    return in->finished != first;
}

/* What comes next: an all-reduce by this channel's algorithm, in the protocol of large messages. */
static void tell_attributes(struct rank *rank, int channel) {
    enum { TREE, RING };
    struct net_side one = {1, 1, rank->options.channels, rank->options.channels};
    bool tree = channel >= rank->options.channels - rank->options.trees;
    struct net_attributes told = {one, one, 1u << 4, 1u << (tree ? TREE : RING), 1u << 2};
    if (rank->told == told.algorithm) return;
    rank->told = told.algorithm;
    call_begin(rank, OTHER);
    call_end(rank, OTHER, net_set_attributes(&rank->net, &told));
}

/* One all-reduce (or stream), of all channels at once; those not yet connected are waited for. */
void iterate(struct rank *rank) {
    const struct options *o = &rank->options;
    bool active = true, moved;
    int c;
    for (c = 0; c < o->channels; c++) ring_begin(rank, &rank->channels[c]);
    while (active && !rank->failed) {
        active = moved = false;
        for (c = 0; c < o->channels && !rank->failed; c++) {
            struct channel *channel = &rank->channels[c];
            if (!channel->connected) {
                active = true;
                continue;
            }
            tell_attributes(rank, c);
            moved |= post_receives(rank, channel);
            moved |= finish_receives(rank, channel);
            moved |= post_sends(rank, channel);
            moved |= finish_sends(rank, channel);
            active |= channel->in.finished < channel->in.total ||
                      channel->out.finished < channel->out.total;
        }
        if (moved || !active) continue;
        if (o->idle_us > 0)
            sleep_ns(o->idle_us * INT64_C(1000));
        else
            sched_yield();
    }
}

void *progress_thread(void *argument) {
    struct rank *rank = argument;
    int64_t wall, cpu;
    int k;
    rank->told = 0;
    for (k = 0; k < rank->options.iterations && !rank->failed; k++) {
        ring_fill(rank, k);
        if (rank->options.compute_ms > 0) {
            wall = now_ns();
            cpu = cpu_ns();
            sleep_ns(rank->options.compute_ms * INT64_C(1000000));
            if (k > 0) { /* connecting is not idling */
                rank->idle_ns += now_ns() - wall;
                rank->idle_cpu_ns += cpu_ns() - cpu;
            }
        }
        wall = now_ns();
        cpu = cpu_ns();
        iterate(rank);
        if (rank->failed) break;
        if (rank->iterations < MOST_ITERATIONS)
            rank->iteration_ns[rank->iterations++] = now_ns() - wall;
        rank->busy_cpu_ns += cpu_ns() - cpu;
        if (!ring_right(rank, k)) {
            rank->sums_right = false;
            fail(rank, TEST, NET_OK, "wrong sums");
        }
    }
    pthread_mutex_lock(&rank->lock);
    rank->ended = true;
    pthread_cond_signal(&rank->progress_ended);
    pthread_mutex_unlock(&rank->lock);
    return NULL;
}
