/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plugin.h - what the plugin's files share.
 *
 *   tables.c     one table for each version of the interface
 *   options.c    environment, log
 *   device.c     which interfaces there are
 *   setup.c      listen, connect, accept
 *   context.c    a communicator
 *   comm.c       a comm: its lanes, its threads, its end
 *   send.c       pieces of requests go to whichever lane is free
 *   receive.c    and are put together again
 *   iteration.c  where a job's iterations begin and end, and what the profiler tells of them
 *   watch.c      the thread that looks after all comms
 *   report.c     what the daemon is told
 *
 * A lane is one data connection. Lanes are moved forward by groups: one per helper thread, or a
 * single one that isend and test move forward themselves. A lane belongs to one group, and only that
 * group's thread touches it, but for its counters.
 *
 * Locks, in this order: a comm's, watch.c's `life`, watch_lock, iteration.c's.
 */
#ifndef FLOWSLOT_NCCL_PLUGIN_H
#define FLOWSLOT_NCCL_PLUGIN_H

#include "flowslot_nccl.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "layouts.h"
#include "wire.h"

#define MOST_THREADS 16
#define MOST_DEVICES 16
#define MOST_REQUESTS 32 /* of one comm */
#define MOST_NAME 16     /* of an interface, as IFNAMSIZ */
#define MOST_TEXT 64     /* an address and a port */
#define PRINTF(text, first) __attribute__((format(printf, text, first)))

#pragma GCC visibility push(hidden)

/* ---- options.c --------------------------------------------------------------------------- */

struct options {
    int threads, lanes_per_thread; /* -1: by the device's vendor */
    int send_buffer, receive_buffer; /* bytes; 0: the kernel's choice */
    int family;                      /* AF_INET, AF_INET6, AF_UNSPEC: either */
    int retries, retry_ms;
    int timeout_ms;
    bool bootstrap; /* NCCL's own set-up goes through us, too */
    bool totals;    /* print them at the end */
    uint64_t iteration_bytes; /* 0: not told */
    char interfaces[256];
    char job[1024]; /* a record has less, with a hash of all */
    char daemon[256]; /* its registration socket; "": the default */
};

extern struct options options;
void options_read(net_log_fn *log);
/* Whether NCCL is to use us, although there is an active InfiniBand port. */
bool options_insist(void);
void warn(const char *format, ...) PRINTF(1, 2);
void inform(const char *format, ...) PRINTF(1, 2);
uint64_t now_ns(void);
uint64_t random64(void);

/* ---- device.c ---------------------------------------------------------------------------- */

struct device {
    char name[MOST_NAME];
    char *pci_path; /* NULL: virtual */
    int speed;      /* Mbit/s */
    struct sockaddr_storage address; /* port 0 */
    int threads, lanes;
};

extern struct device devices[MOST_DEVICES];
extern int device_count;
/* Fills `devices`, once; false where there are none. */
bool devices_find(void);
bool infiniband_active(void);
socklen_t address_size(const struct sockaddr_storage *address);
/* "10.0.0.1:4711", "[::1]:4711" */
void address_text(char text[MOST_TEXT], const struct sockaddr_storage *address);

/* ---- context.c: a communicator ---------------------------------------------------------- */

#define NO_RANK (-1)
#define MANY_RANKS (-2)
#define NO_CHANNEL (-1)
#define MOST_CHANNELS 1024 /* of a communicator; above are communicators */
struct context {
    struct context *next;
    uint64_t id; /* NCCL's, from 2.28 on; 0: of all communicators */
    int first;   /* its channel 0, a multiple of MOST_CHANNELS */
    atomic_int users;
    atomic_int rank;      /* its own, from its sends' tags; MANY_RANKS: they differ */
    atomic_uint algorithm, operation; /* as net_attributes has them */
    atomic_int channels[2];           /* receiving comms so far that are used: of rings, others */
};
struct context *context_new(uint64_t id);
void context_drop(struct context *context);
void context_rank(struct context *context, int rank);
/* Of the last operation that NCCL has told of: enum flowslot_collective, 0: not known. */
uint32_t context_collective(struct context *context);
bool context_ring(struct context *context);

/* ---- comm.c ------------------------------------------------------------------------------ */

struct comm;

struct request {
    struct comm *comm;
    bool used;
    atomic_bool done;
    uint32_t number;
    char *data;
    size_t size;    /* of a receive: room, until `sized`; then the message's */
    size_t next;    /* bytes handed to lanes, or of pieces that have begun to come */
    size_t arrived; /* bytes of pieces that have come as a whole */
    int pieces;     /* that lanes have */
    bool sized;     /* the first piece has said how large the message is */
};

struct lane {
    int fd;
    bool open;    /* as far as is known, the kernel takes, or has, bytes */
    bool ended;   /* the other end has closed it, where it may */
    bool waits;   /* its piece's message is not posted; the comm's lock is over this, and `header` then */
    struct request *request; /* whose piece this lane has; NULL: none */
    struct wire_piece header;
    size_t header_left, left; /* bytes to go */
    char *data;
    uint32_t length; /* of the piece */
    int limit;            /* bytes that the kernel may hold unsent; 0: as it likes */
    int easy;             /* pieces since the kernel took no more, up to some */
    uint64_t rate;        /* bytes/s, last measured */
    uint64_t full_at, full_with; /* ns, `moved`: when a measurement began; 0: none */
    /* Payload since the beginning, for reports: given to this lane, given to the kernel. */
    _Atomic uint64_t assigned, moved;
};

struct group {
    struct comm *comm;
    int events; /* epoll */
    int wake;   /* eventfd, with a thread */
    int first, lanes, turn;
    bool running; /* the thread */
    bool waiting; /* has nothing to do until a request is posted */
    pthread_t thread;
};

struct report { /* report.c's */
    bool wanted, open;
    bool ring;
    int rank;
    uint64_t since;    /* ns, first request */
    _Atomic uint64_t iteration;
    uint64_t from;           /* bytes posted before it */
    uint64_t expected, last; /* bytes of an iteration, 0: not known; of the last one */
    uint64_t posted;         /* by NCCL, at the last look */
    bool over;               /* of the present iteration all has been sent */
    bool ahead;              /* tensors are enqueued of which not all has been given to lanes */
    struct {
        struct flowslot_flow flow;
        uint64_t done, base, total; /* acknowledged; before this iteration; expected in it */
        uint64_t given, early;      /* assigned before this iteration; enqueued in it */
        struct flowslot_nccl_history history;
    } lanes[MOST_LANES];
};

struct comm {
    struct comm *next; /* watch.c's */
    bool sending;
    bool threaded;
    struct context *context;
    struct sockaddr_storage peer;
    int control;
    int lane_count, group_count;
    struct lane lanes[MOST_LANES];
    struct group groups[MOST_THREADS];
    pthread_mutex_t lock; /* over the requests, and `waiting` */
    struct request requests[MOST_REQUESTS];
    uint32_t posted; /* number of the next request */
    int queue[MOST_REQUESTS], queue_from, queued; /* of sends: not all handed to lanes */
    atomic_int pending; /* requests that are not done */
    atomic_int failed;  /* enum net_result */
    atomic_int ended;   /* lanes that the other end has closed */
    atomic_bool stop;
    uint64_t look_at; /* ns: the other end has not been silent for too long before */
    struct wire_note note;
    size_t note_have;
    bool told;                    /* our rank, to the other end */
    atomic_int peer_rank;         /* NO_RANK: not known */
    atomic_int channel;           /* the receiver's number for it; NO_CHANNEL: not known */
    atomic_bool in_ring;          /* of a receiver, once it has a channel */
    _Atomic uint64_t bytes;       /* posted by NCCL */
    struct report report;
};

/* `fds`: its lanes, then control; they become the comm's, also when this fails. */
int comm_new(struct comm **comm, bool sending, struct context *context,
             const struct sockaddr_storage *peer, const int *fds, int lanes, int threads);
void comm_close(struct comm *comm);
/* For how many ms nothing has come from the other end, as the kernel saw it: whoever reads it may have
 * been late. */
int silent_ms(int fd);
int comm_fail(struct comm *comm, int result, const char *format, ...) PRINTF(3, 4);
/* Posts a request; NULL: all are in use. The comm's lock is held. */
struct request *comm_post(struct comm *comm, void *data, size_t size);
/* Let up to `most` groups know that there is something to do. The comm's lock is held. */
void comm_wake(struct comm *comm, int most);
/* Without threads: move all lanes forward, as far as they go without waiting. */
void comm_advance(struct comm *comm);
/* Take what the other end has said of itself, if nobody else does at the moment. */
void comm_hear(struct comm *comm);
void request_done(struct request *request);

/* ---- send.c, receive.c ------------------------------------------------------------------- */

int send_post(struct comm *comm, void *data, size_t size, int tag, bool event, void **request);
/* Keep what the kernel holds of a lane unsent small, by what it sends, bytes/s. */
void send_limit(struct lane *lane, uint64_t rate);
/* Move one lane forward by a piece at most; whether more may be done at once. */
bool send_lane(struct group *group, struct lane *lane);
/* Something came back on a data lane. */
void send_heard(struct comm *comm, struct lane *lane);
int receive_post(struct comm *comm, void *data, size_t size, int tag, bool event, void **request);
bool receive_lane(struct group *group, struct lane *lane);
/* Tell the other end our rank, once it is known. */
void receive_tell(struct comm *comm);
int request_test(struct request *request, int *done, int *size);

/* ---- setup.c ----------------------------------------------------------------------------- */

struct listener;
int setup_listen(struct context *context, int device, void *handle, void **listener);
int setup_connect(struct context *context, int device, void *handle, void **comm);
int setup_accept(void *listener, void **comm);
int setup_close_listen(void *listener);
/* Take in who has connected, and give them a sign of life. */
void setup_beat(struct listener *listener);
/* Attempts of this context, which NCCL has given up. */
void setup_forget(struct context *context);
/* Whether NCCL uses this plugin: it loads more than it uses, and keeps one that declined. */
bool setup_used(void);

/* ---- iteration.c ------------------------------------------------------------------------- */

/* NCCL posts so many bytes: the number of the iteration that they belong to. */
uint64_t iteration_post(uint64_t bytes);
/* Bytes have moved. */
void iteration_touch(uint64_t now);
/* Whether the job computes: nothing has moved for longer than pauses within an iteration are, or
 * (`long_one`) for as long as between two. */
bool iteration_paused(uint64_t now, bool long_one);
/* The present one; `tensors`: of a communicator, so far; all 0: nothing is known of it. */
uint64_t iteration_present(uint64_t communicator, struct flowslot_nccl_comm *tensors);
/* A communicator has ended. */
void iteration_forget(uint64_t communicator);

/* ---- watch.c ----------------------------------------------------------------------------- */

/* Over what is reported of a comm, and over the list of comms. */
extern pthread_mutex_t watch_lock;
/* False: it cannot be watched, and must not be used. */
bool watch_add(struct comm *comm);
void watch_remove(struct comm *comm);
/* Give who connects to it signs of life until accept is called; false: as above. */
bool watch_listen(struct listener *listener);
void watch_forget(struct listener *listener);
/* There is something to report. */
void watch_rouse(void);
/* Tell the other end that we are alive, and our rank. */
void watch_note(struct comm *comm);

/* ---- report.c ---------------------------------------------------------------------------- */

/* In isend, before anything is sent of it. */
void report_posted(struct comm *comm, size_t size, int tag, bool event);
/* The rest with watch_lock held. Whether there is nothing more to tell until something is posted: */
bool report_look(struct comm *comm, uint64_t now);
/* Whether a daemon listens, or may. */
bool report_poll(uint64_t now);
void report_close(struct comm *comm);
void report_end(void);

#pragma GCC visibility pop
#endif
