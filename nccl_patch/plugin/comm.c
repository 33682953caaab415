/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.c - a comm's lanes, who moves them forward, and its end.
 *
 * A group waits in epoll, edge-triggered: a lane is open from the event on until the kernel says
 * EAGAIN. A thread sleeps when no lane of its group can move; it is woken by sockets, and by requests
 * through its eventfd. While waits are short it yields before it sleeps: to wake a thread of another
 * processor costs who sends the packets more than they do. Without threads the caller looks, and never waits.
 */
#include "plugin.h"

#include <limits.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define WAKE UINT64_MAX            /* an event's data: the eventfd, */
#define CONTROL (UINT64_MAX - 1)   /* the control connection, or a lane's number */
#define MOST_EVENTS (MOST_LANES + 2)
#define ROUNDS 8 /* between looks at what the kernel has to say */
#define SOON_NS UINT64_C(50000)

/* ---- Failure ----------------------------------------------------------------------------- */

/* The first failure is the comm's. */
int comm_fail(struct comm *comm, int result, const char *format, ...) {
    char text[256], peer[MOST_TEXT];
    int none = NET_OK;
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof(text), format, values);
    va_end(values);
    if (!atomic_compare_exchange_strong(&comm->failed, &none, result)) return none;
    address_text(peer, &comm->peer);
    warn("%s %s: %s", comm->sending ? "sending to" : "receiving from", peer, text);
    return result;
}

int silent_ms(int fd) {
    struct tcp_info info;
    socklen_t size = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
    return info.tcpi_last_data_recv < INT_MAX ? (int)info.tcpi_last_data_recv : INT_MAX;
}

/* Has the other end not given a sign of life for too long? Its plugin does, while it only computes. */
static void check_silence(struct comm *comm) {
    uint64_t now = now_ns();
    int silent;
    if (atomic_load(&comm->pending) == 0 || now < comm->look_at) return;
    silent = silent_ms(comm->control);
    for (int i = 0; i < comm->lane_count && silent >= options.timeout_ms; i++) {
        int other = silent_ms(comm->lanes[i].fd);
        if (other < silent) silent = other;
    }
    comm->look_at = now + (uint64_t)(options.timeout_ms - silent) * 1000000u; /* not before */
    if (silent >= options.timeout_ms)
        comm_fail(comm, NET_REMOTE_ERROR, "no sign of life for %d s (FLOWSLOT_NCCL_TIMEOUT)",
                  options.timeout_ms / 1000);
}

/* Notes: a sign of life, the other end's rank, a receiver's channel. An end is told by the lanes. The
 * comm's lock is held. */
static void read_notes(struct comm *comm) {
    for (;;) {
        char *to = (char *)&comm->note + comm->note_have;
        ssize_t n = recv(comm->control, to, sizeof(comm->note) - comm->note_have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;
        comm->note_have += (size_t)n;
        if (comm->note_have < sizeof(comm->note)) continue;
        comm->note_have = 0;
        if (le32toh(comm->note.magic) != WIRE_NOTE) {
            comm_fail(comm, NET_REMOTE_ERROR, "the other end speaks another protocol");
            return;
        }
        if (!comm->sending) continue;
        if ((int32_t)le32toh((uint32_t)comm->note.channel) >= 0)
            atomic_store(&comm->channel, comm->context->first +
                                             (int)le32toh((uint32_t)comm->note.channel) % MOST_CHANNELS);
        if ((int32_t)le32toh((uint32_t)comm->note.rank) >= 0)
            atomic_store(&comm->peer_rank, (int)le32toh((uint32_t)comm->note.rank));
    }
}

void comm_hear(struct comm *comm) {
    if (pthread_mutex_trylock(&comm->lock) != 0) return;
    read_notes(comm);
    pthread_mutex_unlock(&comm->lock);
}

/* ---- Groups ------------------------------------------------------------------------------ */

static void take_events(struct group *group, const struct epoll_event *events, int n) {
    struct comm *comm = group->comm;
    uint64_t times;
    for (int i = 0; i < n; i++) {
        uint64_t which = events[i].data.u64;
        if (which == WAKE) {
            (void)!read(group->wake, &times, sizeof(times));
        } else if (which == CONTROL) {
            pthread_mutex_lock(&comm->lock);
            read_notes(comm);
            pthread_mutex_unlock(&comm->lock);
        } else {
            struct lane *lane = &comm->lanes[which];
            bool back = events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR);
            if (comm->sending && back) send_heard(comm, lane);
            if (!comm->sending || (events[i].events & EPOLLOUT)) lane->open = true;
        }
    }
}

/* Whether anything moved. Every lane has its turn; another one is the first each time. */
static bool advance_group(struct group *group) {
    bool moved = false;
    int first = group->turn;
    group->turn = (first + 1) % group->lanes;
    for (int i = 0; i < group->lanes && !atomic_load(&group->comm->failed); i++) {
        struct lane *lane = &group->comm->lanes[group->first + (first + i) % group->lanes];
        if (!lane->open || lane->ended) continue;
        if (group->comm->sending ? send_lane(group, lane) : receive_lane(group, lane)) moved = true;
    }
    return moved;
}

void comm_advance(struct comm *comm) {
    struct group *group = &comm->groups[0];
    struct epoll_event events[MOST_EVENTS];
    int n = epoll_wait(group->events, events, MOST_EVENTS, 0);
    if (n > 0) take_events(group, events, n);
    for (int i = 0; i < ROUNDS && advance_group(group); i++) continue; /* others want their turn */
    check_silence(comm);
}

/* How long a group may sleep, ms; -1: until it is woken. The first one looks after silence. */
static int until_when(struct group *group) {
    struct comm *comm = group->comm;
    uint64_t now = now_ns();
    int wait = -1;
    pthread_mutex_lock(&comm->lock);
    if (atomic_load(&comm->pending) == 0 || atomic_load(&comm->failed))
        group->waiting = true;
    else if (group == comm->groups)
        wait = now < comm->look_at ? (int)((comm->look_at - now) / 1000000u) + 1 : 0;
    pthread_mutex_unlock(&comm->lock);
    return wait;
}

static void *run(void *of) {
    struct group *group = of;
    struct comm *comm = group->comm;
    struct epoll_event events[MOST_EVENTS];
    uint64_t began, stopped = 0; /* ns: when it moved last, */
    bool soon = false;           /* and whether there was little time before */
    while (!atomic_load(&comm->stop)) {
        int n, rounds = 0, wait = 0;
        began = now_ns();
        while (rounds < ROUNDS && advance_group(group)) rounds++;
        if (rounds > 0) {
            soon = began - stopped < SOON_NS;
            stopped = began = now_ns();
        }
        if (rounds < ROUNDS && (!soon || began - stopped >= SOON_NS)) wait = until_when(group);
        n = epoll_wait(group->events, events, MOST_EVENTS, wait);
        if (n > 0)
            take_events(group, events, n);
        else if (wait == 0 && rounds == 0)
            sched_yield();
        if (group == comm->groups) check_silence(comm);
    }
    return NULL;
}

/* `n` groups at most wake up. */
void comm_wake(struct comm *comm, int n) {
    uint64_t once = 1;
    for (int i = 0; i < comm->group_count && n > 0; i++) {
        struct group *group = &comm->groups[i];
        if (!comm->threaded || !group->waiting) continue;
        group->waiting = false;
        (void)!write(group->wake, &once, sizeof(once));
        n--;
    }
}

static bool watch(const struct group *group, int fd, uint64_t which, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u64 = which};
    return epoll_ctl(group->events, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool group_new(struct comm *comm, int i) {
    struct group *group = &comm->groups[i];
    uint32_t events = EPOLLET | EPOLLIN | EPOLLRDHUP | (comm->sending ? EPOLLOUT : 0);
    bool good;
    group->comm = comm;
    group->first = comm->lane_count * i / comm->group_count;
    group->lanes = comm->lane_count * (i + 1) / comm->group_count - group->first;
    group->events = epoll_create1(EPOLL_CLOEXEC);
    good = group->events >= 0;
    for (int k = 0; k < group->lanes && good; k++) {
        int lane = group->first + k;
        good = watch(group, comm->lanes[lane].fd, (uint64_t)lane, events);
    }
    if (i == 0 && good) good = watch(group, comm->control, CONTROL, EPOLLIN | EPOLLET);
    if (!comm->threaded || !good) return good;
    group->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return group->wake >= 0 && watch(group, group->wake, WAKE, EPOLLIN);
}

static bool start(struct comm *comm) {
    sigset_t all, before;
    bool good = true;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the application's */
    for (int i = 0; i < comm->group_count && good; i++) {
        good = pthread_create(&comm->groups[i].thread, NULL, run, &comm->groups[i]) == 0;
        comm->groups[i].running = good;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return good;
}

static void stop(struct comm *comm) {
    uint64_t once = 1;
    atomic_store(&comm->stop, true);
    for (int i = 0; i < comm->group_count; i++)
        if (comm->groups[i].running)
            (void)!write(comm->groups[i].wake, &once, sizeof(once));
    for (int i = 0; i < comm->group_count; i++)
        if (comm->groups[i].running)
            pthread_join(comm->groups[i].thread, NULL);
}

/* ---- The comm ---------------------------------------------------------------------------- */

static void release(struct comm *comm) {
    for (int i = 0; i < comm->lane_count; i++) close(comm->lanes[i].fd);
    close(comm->control);
    for (int i = 0; i < comm->group_count; i++) {
        if (comm->groups[i].events >= 0) close(comm->groups[i].events);
        if (comm->groups[i].wake >= 0) close(comm->groups[i].wake);
    }
    pthread_mutex_destroy(&comm->lock);
    context_drop(comm->context);
    free(comm);
}

int comm_new(struct comm **to, bool sending, struct context *context,
             const struct sockaddr_storage *peer, const int *fds, int lanes, int threads) {
    struct comm *comm = calloc(1, sizeof(*comm));
    bool good = true;
    if (comm == NULL) {
        for (int i = 0; i <= lanes; i++) close(fds[i]);
        return NET_SYSTEM_ERROR;
    }
    comm->sending = sending;
    comm->context = context;
    atomic_fetch_add(&context->users, 1);
    comm->lane_count = lanes;
    comm->control = fds[lanes];
    comm->threaded = threads > 0;
    comm->group_count = threads == 0 ? 1 : threads < lanes ? threads : lanes;
    comm->peer_rank = NO_RANK;
    comm->channel = NO_CHANNEL;
    pthread_mutex_init(&comm->lock, NULL);
    comm->peer = *peer;
    for (int i = 0; i < lanes; i++) {
        comm->lanes[i].fd = fds[i];
        comm->lanes[i].header_left = sending ? 0 : sizeof(struct wire_piece);
        if (sending && lanes > 1) send_limit(&comm->lanes[i], 0);
    }
    for (int i = 0; i < MOST_THREADS; i++) comm->groups[i].events = comm->groups[i].wake = -1;
    for (int i = 0; i < comm->group_count && good; i++) good = group_new(comm, i);
    if (!good) {
        warn("cannot set up a connection: %s", strerror(errno));
        release(comm);
        return NET_SYSTEM_ERROR;
    }
    if (!watch_add(comm) || (comm->threaded && !start(comm))) {
        warn("cannot start threads: NCCL_SOCKET_NTHREADS is %d", threads);
        comm_close(comm);
        return NET_SYSTEM_ERROR;
    }
    *to = comm;
    return NET_OK;
}

void comm_close(struct comm *comm) {
    stop(comm);
    watch_remove(comm);
    release(comm);
}

/* ---- Requests ---------------------------------------------------------------------------- */

struct request *comm_post(struct comm *comm, void *data, size_t size) {
    for (int i = 0; i < MOST_REQUESTS; i++) {
        struct request *request = &comm->requests[i];
        if (request->used) continue;
        memset(request, 0, sizeof(*request));
        request->comm = comm;
        request->used = true;
        request->number = comm->posted++;
        request->data = data;
        request->size = size;
        atomic_fetch_add(&comm->pending, 1);
        return request;
    }
    return NULL;
}

/* The comm's lock is held. */
void request_done(struct request *request) {
    atomic_fetch_sub(&request->comm->pending, 1);
    atomic_store(&request->done, true);
}

/* The other end has closed its lanes, and what is pending will never be done: a lane that has not come
 * to its end waits for a later message. */
static bool is_lost(struct comm *comm) {
    int over = atomic_load(&comm->ended);
    if (over == 0 || over == comm->lane_count) return over != 0;
    pthread_mutex_lock(&comm->lock);
    for (int i = 0; i < comm->lane_count; i++) {
        const struct lane *lane = &comm->lanes[i];
        if (lane->waits && (int32_t)(le32toh(lane->header.request) - comm->posted) >= 0) over++;
    }
    pthread_mutex_unlock(&comm->lock);
    return over == comm->lane_count;
}

int request_test(struct request *request, int *done, int *size) {
    struct comm *comm;
    int result;
    if (request == NULL || done == NULL || !request->used) return NET_BAD_ARGUMENT;
    comm = request->comm;
    *done = 0;
    if (!atomic_load(&request->done) && !comm->threaded) comm_advance(comm);
    if (!comm->sending) receive_tell(comm);
    if (atomic_load(&request->done)) {
        *done = 1;
        if (size != NULL) *size = (int)request->size;
        pthread_mutex_lock(&comm->lock);
        request->used = false;
        pthread_mutex_unlock(&comm->lock);
        return NET_OK;
    }
    result = atomic_load(&comm->failed);
    if (result == NET_OK && is_lost(comm) && !atomic_load(&request->done))
        result = comm_fail(comm, NET_REMOTE_ERROR, "the other end closed the connection");
    return result;
}
