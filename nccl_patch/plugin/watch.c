/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - a thread that looks after all comms of this process. While something is under way it looks
 * every 4 ms at what is to be reported (report.c); otherwise it sleeps, but for the signs of life that
 * it gives to the other ends. A process that only computes gives them; one that has been stopped, or
 * whose host is gone, does not.
 */
#include "setup.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#define LOOK_MS 4    /* what begins within 5 ms the daemon takes for one phase */
#define ALONE_MS 100 /* where there is no daemon */
#define BEATS 20     /* in a timeout, */
#define BEAT_MS 1000 /* and at least one in this time: the other end may have a shorter one */

pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm *comms;
static struct listener *listeners;
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER; /* over the thread; taken before watch_lock */
static pthread_t thread;
static bool running;
static int wake = -1;
static atomic_bool ending, asleep;

/* The other end's epoll has it. A note is short enough to go as a whole, or not at all. */
void watch_note(struct comm *comm) {
    int rank = atomic_load_explicit(&comm->context->rank, memory_order_relaxed);
    struct wire_note note = {.magic = htole32(WIRE_NOTE)};
    note.rank = (int32_t)htole32((uint32_t)(rank >= 0 ? rank : NO_RANK));
    note.channel = (int32_t)htole32((uint32_t)atomic_load(&comm->channel));
    (void)!send(comm->control, &note, sizeof(note), MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* ms until the next sign of life is due. */
static int beat(uint64_t now) {
    static uint64_t next;
    int ms = options.timeout_ms / BEATS < BEAT_MS ? options.timeout_ms / BEATS : BEAT_MS;
    uint64_t every = (uint64_t)ms * 1000000u;
    if (now >= next || next > now + every) {
        for (struct comm *comm = comms; comm != NULL; comm = comm->next) {
            watch_note(comm);
            comm_hear(comm); /* NCCL may not call for hours: what has come would fill the kernel */
        }
        for (struct listener *at = listeners; at != NULL; at = at->next) setup_beat(at);
        next = now + every;
    }
    return (int)((next - now) / 1000000u) + 1;
}

/* Whether there is nothing to report; `wait`: how long it may sleep, ms. */
static bool look(int *wait) {
    uint64_t now = now_ns();
    bool still = true;
    int soon;
    pthread_mutex_lock(&watch_lock);
    *wait = beat(now);
    soon = report_poll(now) ? LOOK_MS : ALONE_MS;
    for (struct comm *comm = comms; comm != NULL; comm = comm->next)
        if (!report_look(comm, now)) still = false;
    pthread_mutex_unlock(&watch_lock);
    if (!still && soon < *wait) *wait = soon;
    return still;
}

static void *run(void *nothing) {
    struct pollfd waking = {.fd = wake, .events = POLLIN};
    uint64_t times;
    int wait;
    while (!atomic_load(&ending)) {
        if (look(&wait)) {
            atomic_store(&asleep, true);
            if (!look(&wait)) atomic_store(&asleep, false); /* of that nobody was told */
        }
        (void)poll(&waking, 1, wait);
        atomic_store(&asleep, false);
        if (waking.revents) (void)!read(wake, &times, sizeof(times));
    }
    return nothing;
}

void watch_rouse(void) {
    uint64_t once = 1;
    if (!atomic_load(&asleep)) return;
    pthread_mutex_lock(&life); /* `wake` stays what it is */
    if (running && atomic_exchange(&asleep, false)) (void)!write(wake, &once, sizeof(once));
    pthread_mutex_unlock(&life);
}

static bool start(void) {
    sigset_t all, before;
    wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (wake < 0) return false;
    atomic_store(&ending, false);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the application's */
    running = pthread_create(&thread, NULL, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!running) close(wake);
    return running;
}

static void stop(void) {
    uint64_t once = 1;
    atomic_store(&ending, true);
    (void)!write(wake, &once, sizeof(once));
    pthread_join(thread, NULL);
    close(wake);
    running = false;
}

/* `life` is held. */
static void stop_if_unused(void) {
    if (comms == NULL && listeners == NULL && running) stop();
}

bool watch_add(struct comm *comm) {
    bool good;
    pthread_mutex_lock(&life);
    good = running || start();
    if (good) {
        pthread_mutex_lock(&watch_lock);
        comm->report.rank = NO_RANK;
        comm->next = comms;
        comms = comm;
        watch_note(comm);
        pthread_mutex_unlock(&watch_lock);
    }
    pthread_mutex_unlock(&life);
    return good;
}

void watch_remove(struct comm *comm) {
    struct comm **at;
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&watch_lock);
    for (at = &comms; *at != NULL && *at != comm;) at = &(*at)->next;
    if (*at != NULL) {
        *at = comm->next;
        report_close(comm);
    }
    if (comms == NULL) report_end();
    pthread_mutex_unlock(&watch_lock);
    stop_if_unused();
    pthread_mutex_unlock(&life);
}

bool watch_listen(struct listener *listener) {
    bool good;
    pthread_mutex_lock(&life);
    good = running || start();
    if (good) {
        pthread_mutex_lock(&watch_lock);
        listener->next = listeners;
        listeners = listener;
        pthread_mutex_unlock(&watch_lock);
    }
    pthread_mutex_unlock(&life);
    return good;
}

void watch_forget(struct listener *listener) {
    struct listener **at;
    pthread_mutex_lock(&life);
    pthread_mutex_lock(&watch_lock);
    for (at = &listeners; *at != NULL && *at != listener;) at = &(*at)->next;
    if (*at != NULL) *at = listener->next;
    pthread_mutex_unlock(&watch_lock);
    stop_if_unused();
    pthread_mutex_unlock(&life);
}
