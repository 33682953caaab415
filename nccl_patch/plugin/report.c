/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - what the daemon is told: a progress record with a slot for each lane that sends, and one
 * for each comm that receives, which only says who the peer is.
 *
 *   ready   NCCL has posted it, and it was given to this lane; beside the profiler its share of the
 *           tensors that are enqueued (flowslot_nccl.h), where that is more
 *   posted  the kernel has it
 *   done    the other end's kernel has acknowledged it (SIOCOUTQ; of headers that are under way a
 *           little counts as payload, so it is never too much)
 *
 * A comm's total is known when its last two iterations had the same; each lane is expected to carry
 * its share of the rest. Until all has been sent a lane's record stays active, from one slice to the
 * next: a total that is not reached, or, where none is known, a last byte that is kept back until the
 * job pauses. So a lane rings at most once when an iteration begins, and once when it ends.
 *
 * What happens here happens on watch.c's thread, but for the beginning of an iteration.
 */
#include "plugin.h"

#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>

#define SLOTS 1024
#define PATIENCE_NS UINT64_C(100000000) /* to wait for the peer's rank */
#define POLL_NS UINT64_C(10000000)

/* watch_lock is over all of this. */
static struct flowslot job;
static bool opened, heard;
static uint64_t polled;

/* ---- One lane ---------------------------------------------------------------------------- */

static uint64_t assigned(const struct comm *comm, int i) {
    return atomic_load_explicit(&comm->lanes[i].assigned, memory_order_relaxed);
}

/* Acknowledged payload, so far. */
static uint64_t acknowledged(struct comm *comm, int i) {
    uint64_t moved = atomic_load(&comm->lanes[i].moved), done;
    int queued = 0;
    if (ioctl(comm->lanes[i].fd, SIOCOUTQ, &queued) != 0 || queued < 0) queued = 0;
    done = moved > (uint64_t)queued ? moved - (uint64_t)queued : 0;
    if (done > comm->report.lanes[i].done) comm->report.lanes[i].done = done;
    return comm->report.lanes[i].done;
}

/* Bring the slot of lane `i` up to date. */
static void publish_lane(struct comm *comm, int i) {
    struct report *report = &comm->report;
    struct flowslot_flow *flow = &report->lanes[i].flow;
    uint64_t base = report->lanes[i].base, total = report->lanes[i].total;
    uint64_t done = acknowledged(comm, i) - base;
    uint64_t posted = atomic_load(&comm->lanes[i].moved) - base;
    uint64_t ready = assigned(comm, i) - base, early = report->lanes[i].early;
    struct flowslot_slot *slot = flow->slot;
    if (slot == NULL) return;
    if (report->over) total = ready;
    if (early > 0) early += report->lanes[i].given - base; /* to what is late of the last one */
    if (total > 0 && early > total) early = total;
    if (!report->over && ready < early) ready = early;
    /* Something stays to be done: */
    if (!report->over && done == ready && ready > 0 && total <= ready) done--;
    if (FLOWSLOT_GET(slot->iteration_total) != total && (total > 0 || report->over))
        flowslot_begin(flow, report->iteration, total);
    if (ready < FLOWSLOT_GET(slot->ready)) ready = FLOWSLOT_GET(slot->ready);
    if (posted < FLOWSLOT_GET(slot->posted)) posted = FLOWSLOT_GET(slot->posted);
    if (done < FLOWSLOT_GET(slot->done)) done = FLOWSLOT_GET(slot->done);
    flowslot_progress_add(flow, ready - FLOWSLOT_GET(slot->ready),
                          posted - FLOWSLOT_GET(slot->posted), done - FLOWSLOT_GET(slot->done));
}

/* ---- One comm ---------------------------------------------------------------------------- */

static uint64_t all_assigned(const struct comm *comm) {
    uint64_t sum = 0;
    for (int i = 0; i < comm->lane_count; i++) sum += assigned(comm, i);
    return sum;
}

/* What is expected beyond what lanes have got, in equal shares; more than nothing for each. */
static void share_out(struct comm *comm, uint64_t rest) {
    uint64_t lanes = (uint64_t)comm->lane_count, share = (rest + lanes - 1) / lanes;
    for (int i = 0; i < comm->lane_count; i++)
        comm->report.lanes[i].total = assigned(comm, i) - comm->report.lanes[i].base + share;
}

/* What is enqueued of this iteration, by lanes. Of several lanes each says half of its share: a piece
 * goes to whichever is free, and what is said and does not come would look like something to send. */
static void look_ahead(struct comm *comm, const struct flowslot_nccl_comm *tensors) {
    struct report *report = &comm->report;
    uint64_t early = 0, given = 0;
    for (int i = 0; i < comm->lane_count; i++) {
        uint64_t share = report->lanes[i].history.share / (comm->lane_count > 1 ? 2 : 1);
        report->lanes[i].early = flowslot_nccl__part(tensors, share);
        early += report->lanes[i].early;
        given += assigned(comm, i) - report->lanes[i].given;
    }
    report->ahead = early > given;
}

/* Shares are settled anew when a lane has had its own: seldom, for each change is news. */
static void settle(struct comm *comm, bool ends) {
    struct report *report = &comm->report;
    uint64_t bytes = atomic_load(&comm->bytes), given = all_assigned(comm);
    uint64_t expected = report->from + report->expected;
    bool known = report->expected > 0, full = false;
    bool still = report->over && bytes == report->posted; /* though others may have begun to send */
    report->over = ends || (known && bytes >= expected && given == bytes) ||
                   (!report->ahead && (still || iteration_paused(now_ns(), known)));
    report->posted = bytes;
    if (report->over || !known || given >= expected) return;
    for (int i = 0; i < comm->lane_count; i++)
        if (assigned(comm, i) - report->lanes[i].base >= report->lanes[i].total) full = true;
    if (full) share_out(comm, expected - given);
}

/* Whether all is done and told. `ends`: the present iteration has no more. */
static bool publish(struct comm *comm, bool ends) {
    bool still = true;
    if (!comm->report.open) return !comm->report.wanted;
    if (!comm->sending) return true;
    settle(comm, ends);
    for (int i = 0; i < comm->lane_count; i++) {
        publish_lane(comm, i);
        if (comm->report.lanes[i].done < assigned(comm, i)) still = false;
    }
    return still && (comm->report.over || comm->report.ahead);
}

/* The present iteration's beginning: what is not acknowledged yet counts to it. */
static void begin(struct comm *comm, uint64_t iteration, uint64_t from) {
    struct report *report = &comm->report;
    report->iteration = iteration;
    report->from = from;
    report->over = report->ahead = false;
    for (int i = 0; i < comm->lane_count; i++) {
        report->lanes[i].base = acknowledged(comm, i);
        report->lanes[i].total = report->lanes[i].early = 0;
        report->lanes[i].given = assigned(comm, i);
    }
    if (report->expected > 0 && all_assigned(comm) < from + report->expected)
        share_out(comm, from + report->expected - all_assigned(comm));
    for (int i = 0; i < comm->lane_count && report->open; i++)
        flowslot_begin(&report->lanes[i].flow, iteration, report->lanes[i].total);
}

/* The job may be in another iteration: then this comm is, too, which has posted `from` bytes before. */
static void follow(struct comm *comm, uint64_t from) {
    struct report *report = &comm->report;
    struct flowslot_nccl_comm tensors;
    uint64_t iteration = iteration_present(comm->context->id, &tensors), bytes;
    if (iteration == report->iteration) return;
    bytes = from - report->from;
    publish(comm, true);
    for (int i = 0; i < comm->lane_count; i++)
        flowslot_nccl__remember(&report->lanes[i].history,
                                assigned(comm, i) - report->lanes[i].given);
    report->expected = bytes > 0 && bytes == report->last ? bytes : 0;
    report->last = bytes;
    begin(comm, iteration, from);
}

/* ---- Slots ------------------------------------------------------------------------------- */

static enum flowslot_role role_of(const struct comm *comm) {
    if (!comm->sending) return FLOWSLOT_RECEIVE;
    return comm->report.ring ? FLOWSLOT_RING : FLOWSLOT_UNKNOWN;
}

/* Rings' channels tell which rank comes before; a tree's receiver must not be taken for one. */
static int channel_of(struct comm *comm) {
    int channel = atomic_load(&comm->channel);
    return comm->sending || atomic_load(&comm->in_ring) ? channel : NO_CHANNEL;
}

/* A receiving comm has one slot, by which its peer is known. */
static void open_slots(struct comm *comm) {
    struct report *report = &comm->report;
    int lanes = comm->sending ? comm->lane_count : 1;
    if (!opened) (void)flowslot_open(&job, options.daemon, options.job, report->rank, SLOTS);
    opened = true; /* where that failed, all that follows does nothing */
    job.rank = report->rank; /* one process may have several */
    for (int i = 0; i < lanes; i++) {
        if (flowslot_flow_open(&job, &report->lanes[i].flow, comm->lanes[i].fd,
                               atomic_load(&comm->peer_rank), channel_of(comm),
                               role_of(comm)) != 0)
            continue;
        if (comm->sending)
            flowslot_begin(&report->lanes[i].flow, report->iteration, report->lanes[i].total);
    }
    report->open = true;
}

static void close_slots(struct comm *comm) {
    for (int i = 0; i < comm->lane_count && comm->report.open; i++)
        if (comm->report.lanes[i].flow.slot != NULL)
            flowslot_flow_close(&comm->report.lanes[i].flow);
    comm->report.open = false;
}

/* Its own rank and the peer's are part of what a flow is: wait for the peer's, for a while. A receiver
 * has a channel once something is posted that is no set-up. */
static void open_when_known(struct comm *comm, uint64_t now) {
    struct report *report = &comm->report;
    if (!comm->sending && !report->wanted && atomic_load(&comm->channel) != NO_CHANNEL) {
        report->rank = atomic_load(&comm->context->rank);
        report->wanted = report->rank >= 0 && atomic_load(&comm->peer_rank) != NO_RANK;
        report->since = now;
    }
    if (!report->wanted || report->open) return;
    if (atomic_load(&comm->peer_rank) != NO_RANK || now - report->since > PATIENCE_NS)
        open_slots(comm);
}

/* What has become known since, and what NCCL does with the comm now. */
static void update_parts(struct comm *comm) {
    int peer = atomic_load(&comm->peer_rank), channel = channel_of(comm);
    uint32_t collective = context_collective(comm->context);
    for (int i = 0; i < comm->lane_count && comm->report.open; i++)
        flowslot_flow_part(&comm->report.lanes[i].flow, comm->report.rank, peer, channel,
                           collective);
}

/* ---- For the thread that looks ----------------------------------------------------------- */

bool report_look(struct comm *comm, uint64_t now) {
    struct flowslot_nccl_comm tensors;
    bool told, queued = false;
    open_when_known(comm, now);
    update_parts(comm);
    (void)iteration_present(comm->context->id, &tensors);
    if (comm->sending && comm->report.wanted && tensors.tensors > 0) {
        follow(comm, atomic_load(&comm->bytes)); /* it begins before anything is posted */
        look_ahead(comm, &tensors);
    }
    told = publish(comm, false);
    for (int i = 0; i < comm->lane_count && comm->sending; i++)
        if (comm->report.lanes[i].done < assigned(comm, i)) queued = true;
    if (queued) iteration_touch(now); /* the kernel still sends */
    return told;
}

bool report_poll(uint64_t now) {
    if (opened && now - polled >= POLL_NS) {
        heard = flowslot_poll(&job);
        polled = now;
    }
    return heard || !opened;
}

void report_end(void) {
    if (opened) flowslot_close(&job);
    opened = heard = false;
}

/* ---- For the comms ----------------------------------------------------------------------- */

/* Set-up messages of NCCL are not the job's: a comm is reported once it has had another. */
static bool is_wanted(struct comm *comm, int tag, bool event) {
    struct report *report = &comm->report;
    struct flowslot_nccl_comm none;
    if (options.bootstrap && !event) return false;
    report->wanted = true;
    report->since = now_ns();
    report->rank = tag;
    report->ring = context_ring(comm->context);
    begin(comm, iteration_present(comm->context->id, &none), atomic_load(&comm->bytes));
    return true;
}

void report_posted(struct comm *comm, size_t size, int tag, bool event) {
    struct report *report = &comm->report;
    bool wanted = report->wanted;
    if (!wanted) {
        pthread_mutex_lock(&watch_lock);
        wanted = is_wanted(comm, tag, event);
        pthread_mutex_unlock(&watch_lock);
    }
    if (wanted) context_rank(comm->context, tag); /* tags of set-up are no ranks */
    if (wanted && size > 0 && iteration_post(size) != report->iteration) {
        pthread_mutex_lock(&watch_lock);
        follow(comm, atomic_load(&comm->bytes));
        pthread_mutex_unlock(&watch_lock);
    }
    /* Only now: as one of the last iteration's it would look like news of that. */
    atomic_fetch_add(&comm->bytes, size);
    if (wanted && size > 0) watch_rouse();
}

void report_close(struct comm *comm) {
    struct report *report = &comm->report;
    uint64_t done = 0;
    char peer[MOST_TEXT];
    publish(comm, true);
    close_slots(comm);
    for (int i = 0; i < comm->lane_count; i++)
        done += comm->sending ? acknowledged(comm, i) : atomic_load(&comm->lanes[i].moved);
    if (!options.totals) return;
    address_text(peer, &comm->peer);
    fprintf(stderr,
            "flowslot: rank %d %s %d (%s): channel %d, iteration %llu, %llu bytes, %llu done\n",
            report->rank, comm->sending ? "to" : "from", atomic_load(&comm->peer_rank), peer,
            atomic_load(&comm->channel), (unsigned long long)report->iteration,
            (unsigned long long)atomic_load(&comm->bytes), (unsigned long long)done);
}
