/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flowslot_shm.h - how a communication library tells flowslot what it sends.
 *
 * One header, nothing to link; C99 or C++11 on Linux (include it first, or build with
 * -D_GNU_SOURCE). A process keeps a progress record in memory that it shares with the daemon of
 * its host: one slot per socket. From it the daemon knows what is still to be sent, and paces the
 * sockets in the kernel.
 *
 *     static struct flowslot job;                            // once per process (rank)
 *     flowslot_open(&job, NULL, "resnet50", rank, 64);       // NULL: $FLOWSLOT_SOCKET or default
 *
 *     struct flowslot_flow flow;                             // once per connected socket
 *     flowslot_flow_open(&job, &flow, fd, peer_rank, channel, FLOWSLOT_RING);
 *
 *     for (uint64_t i = 0; i < iterations; i++) {
 *         flowslot_begin(&flow, i, bytes_in_iteration);      // 0: not known
 *         flowslot_ready(&flow, n);                          // n more bytes may be sent,
 *         flowslot_posted(&flow, n);                         // ... were handed to the transport,
 *         flowslot_done(&flow, n);                           // ... were completed by it
 *     }
 *
 *     flowslot_flow_close(&flow);                            // before close(fd)
 *     flowslot_close(&job);
 *
 * Nothing here fails in a way that matters, blocks, or touches errno. Without a daemon the job runs
 * unscheduled, and flowslot_begin() finds a daemon that comes (back) later. ready, posted and done
 * cost some 20 ns, allocate nothing, and enter the kernel only when a flow becomes active or idle.
 *
 * Threads: every function may run on any thread; calls on the same flow must not overlap.
 * Fork: a child must not use its parent's `struct flowslot`.
 */
#ifndef FLOWSLOT_SHM_H
#define FLOWSLOT_SHM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef MFD_ALLOW_SEALING
#error "include flowslot_shm.h before all system headers, or compile with -D_GNU_SOURCE"
#endif

/* ---- Layout: shared with flowslot_shm/layout.py; host byte order ------------------------- */

#define FLOWSLOT_MAGIC "flowslot" /* 8 bytes, no NUL */
#define FLOWSLOT_VERSION 1
#define FLOWSLOT_DEFAULT_PATH "/run/flowslot/register.sock"

enum flowslot_state { FLOWSLOT_FREE, FLOWSLOT_IDLE, FLOWSLOT_ACTIVE };
enum flowslot_role {
    FLOWSLOT_UNKNOWN,
    FLOWSLOT_RING,
    FLOWSLOT_PUSH,   /* worker to parameter server */
    FLOWSLOT_PULL,   /* parameter server to worker */
    FLOWSLOT_RECEIVE /* this end only receives: its socket is left alone */
};
enum flowslot_collective { /* 0: not known */
    FLOWSLOT_BROADCAST = 1,
    FLOWSLOT_REDUCE,
    FLOWSLOT_ALL_GATHER,
    FLOWSLOT_REDUCE_SCATTER,
    FLOWSLOT_ALL_REDUCE,
    FLOWSLOT_SEND /* from one rank to another */
};
enum flowslot_transport { FLOWSLOT_NO_TRANSPORT, FLOWSLOT_TCP, FLOWSLOT_RDMA, FLOWSLOT_UDP };
enum flowslot_message { FLOWSLOT_REGISTER = 1, FLOWSLOT_REPLY, FLOWSLOT_BEGIN, FLOWSLOT_END };
enum flowslot_quiet { /* any other value: as FLOWSLOT_QUIET_ALL */
    FLOWSLOT_QUIET_NONE,
    FLOWSLOT_QUIET_ALL,
    FLOWSLOT_QUIET_ENDS /* the kernel tells it when a flow has ended */
};

struct flowslot_header {
    char magic[8];
    uint32_t version;
    uint32_t slots;
    int32_t pid;
    uint32_t quiet;    /* set by the daemon: which doorbells it has no use for */
    uint64_t start_ns; /* CLOCK_REALTIME */
    uint8_t reserved[32];
};

struct flowslot_slot { /* one writer each */
    uint32_t seq;      /* seqlock: odd while it is being written */
    uint16_t state, role;
    uint8_t family; /* AF_INET, AF_INET6, or 0: no addresses */
    uint8_t transport;
    uint16_t reserved0;
    uint16_t sport, dport;
    uint8_t src[16], dst[16]; /* network order; IPv4 in the first four bytes, the rest zero */
    uint64_t sock_cookie;     /* SO_COOKIE: joins the slot with inet_diag and BPF */
    char job[32];
    int32_t rank, peer, channel;
    int32_t fd;
    uint64_t iteration;
    uint64_t ready, posted, done;  /* bytes of this iteration */
    uint64_t iteration_total;      /* expected; 0: unknown */
    uint64_t t_iteration_start_ns; /* CLOCK_MONOTONIC */
    uint64_t t_update_ns;
    uint64_t phases; /* iterations so far that had bytes to send; 0: an older library */
    uint32_t collective; /* enum flowslot_collective: the last one that is known; 0: none */
    uint32_t reserved1;
    uint64_t period_ns; /* from one iteration to the next, as told from outside; 0: not told, 1: unknown */
    uint8_t reserved[72];
};

/* Registration: datagrams on a SOCK_SEQPACKET Unix socket. REGISTER carries the memfd. */
struct flowslot_register {
    char magic[8];
    uint16_t version, type;
    int32_t rank;
    uint32_t slots;
    char job[32];
    uint32_t reserved;
};
struct flowslot_reply { /* may come again at any time: the last one holds */
    char magic[8];
    uint16_t version, type;
    int32_t status; /* 0: accepted */
    char cc[16];    /* congestion control for the job's sockets; "": leave them alone */
    char reason[232];
};
struct flowslot_doorbell { /* BEGIN: a slot became active, END: it became idle or free */
    char magic[8];
    uint16_t version, type;
    uint32_t slot;
};

#define FLOWSLOT_ASSERT(name, condition) typedef char flowslot_assert_##name[(condition) ? 1 : -1]
FLOWSLOT_ASSERT(header, sizeof(struct flowslot_header) == 64);
FLOWSLOT_ASSERT(quiet, offsetof(struct flowslot_header, quiet) == 20);
FLOWSLOT_ASSERT(start, offsetof(struct flowslot_header, start_ns) == 24);
FLOWSLOT_ASSERT(slot, sizeof(struct flowslot_slot) == 256);
FLOWSLOT_ASSERT(sport, offsetof(struct flowslot_slot, sport) == 12);
FLOWSLOT_ASSERT(cookie, offsetof(struct flowslot_slot, sock_cookie) == 48);
FLOWSLOT_ASSERT(job, offsetof(struct flowslot_slot, job) == 56);
FLOWSLOT_ASSERT(rank, offsetof(struct flowslot_slot, rank) == 88);
FLOWSLOT_ASSERT(iteration, offsetof(struct flowslot_slot, iteration) == 104);
FLOWSLOT_ASSERT(update, offsetof(struct flowslot_slot, t_update_ns) == 152);
FLOWSLOT_ASSERT(phases, offsetof(struct flowslot_slot, phases) == 160);
FLOWSLOT_ASSERT(collective, offsetof(struct flowslot_slot, collective) == 168);
FLOWSLOT_ASSERT(period, offsetof(struct flowslot_slot, period_ns) == 176);
FLOWSLOT_ASSERT(message, sizeof(struct flowslot_register) == 56);
FLOWSLOT_ASSERT(reply, sizeof(struct flowslot_reply) == 264);
FLOWSLOT_ASSERT(doorbell, sizeof(struct flowslot_doorbell) == 16);

/* ---- The job's own state; nobody else's business ----------------------------------------- */

enum flowslot_link { FLOWSLOT_ABSENT, FLOWSLOT_ASKED, FLOWSLOT_REGISTERED };

struct flowslot {
    struct flowslot_header *header; /* NULL: no shared memory, and every call does nothing */
    uint32_t slots;
    int32_t rank;
    int memfd;
    int sock;      /* keeps its number for life, see flowslot__connect() */
    uint32_t busy; /* lock over this struct and over which slots are free */
    uint32_t link; /* enum flowslot_link */
    uint64_t retry_ns;
    char job[32];
    char cc[16];      /* as told by the daemon */
    char reason[232]; /* why the daemon refused, for the library's log */
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* "": too long to be one */
};

struct flowslot_flow {
    struct flowslot *job;
    struct flowslot_slot *slot; /* NULL: every call does nothing */
};

#define FLOWSLOT_RETRY_NS UINT64_C(100000000)    /* after an absent daemon */
#define FLOWSLOT_REFUSED_NS UINT64_C(5000000000) /* after a daemon that said no */

static inline int flowslot_poll(struct flowslot *job);

static inline uint64_t flowslot__now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* A job's name in at most 31 characters of visible ASCII. One that is longer, or has others ('_' takes
 * their places), ends with a hash (FNV-1a) of the whole: names of jobs often begin alike. */
static inline void flowslot__name(char to[32], const char *from) {
    uint32_t hash = UINT32_C(2166136261);
    size_t i, most = 31;
    int as_it_is = strlen(from) <= most;
    memset(to, 0, 32);
    for (i = 0; from[i] != '\0'; i++) {
        int visible = from[i] > 0x20 && from[i] < 0x7f;
        hash = (hash ^ (unsigned char)from[i]) * UINT32_C(16777619);
        as_it_is = as_it_is && visible;
        if (i < most) to[i] = visible ? from[i] : '_';
    }
    if (as_it_is) return;
    if (i > most - 9) i = most - 9;
    to[i++] = '-';
    for (most = i + 8; i < most; i++, hash <<= 4) to[i] = "0123456789abcdef"[hash >> 28];
    memset(to + i, 0, 32 - i);
}

static inline struct flowslot_slot *flowslot__slots(const struct flowslot *job) {
    return (struct flowslot_slot *)(void *)(job->header + 1);
}

/* ---- Seqlock: readers see all of a write or nothing -------------------------------------- */

#define FLOWSLOT_GET(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define FLOWSLOT_SET(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)

static inline void flowslot__write_begin(struct flowslot_slot *slot) {
    FLOWSLOT_SET(slot->seq, FLOWSLOT_GET(slot->seq) | 1u);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* the odd number before the data */
}

static inline void flowslot__write_end(struct flowslot_slot *slot) {
    FLOWSLOT_SET(slot->t_update_ns, flowslot__now(CLOCK_MONOTONIC));
    __atomic_store_n(&slot->seq, FLOWSLOT_GET(slot->seq) + 1u, __ATOMIC_RELEASE);
}

/* Replace the whole slot but for its sequence number. */
static inline void flowslot__write(struct flowslot_slot *slot, const struct flowslot_slot *value) {
    unsigned char *to = (unsigned char *)slot;
    const unsigned char *from = (const unsigned char *)value;
    size_t i;
    flowslot__write_begin(slot);
    for (i = sizeof(slot->seq); i < sizeof(*slot); i++) FLOWSLOT_SET(to[i], from[i]);
    flowslot__write_end(slot);
}

/* ---- The daemon: none of this waits ------------------------------------------------------ */

/* Tell the daemon at once; lost when its queue is full, for it looks at every slot boundary. */
static inline void flowslot__ring(struct flowslot_flow *flow, enum flowslot_message kind) {
    struct flowslot_doorbell bell;
    int saved = errno;
    uint32_t quiet = FLOWSLOT_GET(flow->job->header->quiet);
    if (FLOWSLOT_GET(flow->job->link) != FLOWSLOT_REGISTERED) return;
    if (quiet == FLOWSLOT_QUIET_ENDS ? kind == FLOWSLOT_END : quiet != FLOWSLOT_QUIET_NONE) return;
    memcpy(bell.magic, FLOWSLOT_MAGIC, sizeof(bell.magic));
    bell.version = FLOWSLOT_VERSION;
    bell.type = (uint16_t)kind;
    bell.slot = (uint32_t)(flow->slot - flowslot__slots(flow->job));
    (void)!send(flow->job->sock, &bell, sizeof(bell), MSG_DONTWAIT | MSG_NOSIGNAL);
    errno = saved;
}

/* Select the daemon's congestion control; where that is refused the socket stays as it is. */
static inline void flowslot__enlist(const struct flowslot *job, const struct flowslot_slot *slot) {
    uint64_t cookie = 0;
    socklen_t size = sizeof(cookie);
    int fd = FLOWSLOT_GET(slot->fd);
    if (job->cc[0] == '\0' || FLOWSLOT_GET(slot->state) == FLOWSLOT_FREE) return;
    if (FLOWSLOT_GET(slot->transport) != FLOWSLOT_TCP) return;
    if (FLOWSLOT_GET(slot->role) == FLOWSLOT_RECEIVE) return; /* sends only ACKs */
    /* A number that the library closed too early may be another socket by now. */
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 &&
        cookie == FLOWSLOT_GET(slot->sock_cookie))
        (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, job->cc, (socklen_t)strlen(job->cc));
}

static inline void flowslot__leave(struct flowslot *job, uint64_t retry_ns, const char *reason) {
    FLOWSLOT_SET(job->link, FLOWSLOT_ABSENT);
    FLOWSLOT_SET(job->header->quiet, FLOWSLOT_QUIET_NONE);
    memset(job->cc, 0, sizeof(job->cc));
    memset(job->reason, 0, sizeof(job->reason));
    memcpy(job->reason, reason, strnlen(reason, sizeof(job->reason) - 1));
    job->retry_ns = flowslot__now(CLOCK_MONOTONIC) + retry_ns;
}

static inline int flowslot__socket(void) {
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

/* Connect and hand over the record. The answer comes later: flowslot__hear(). */
static inline void flowslot__connect(struct flowslot *job) {
    struct sockaddr_un address;
    struct flowslot_register hello;
    struct iovec data;
    struct msghdr message;
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct cmsghdr *rights;
    int sock = flowslot__socket();

    job->retry_ns = flowslot__now(CLOCK_MONOTONIC) + FLOWSLOT_RETRY_NS;
    FLOWSLOT_SET(job->header->quiet, FLOWSLOT_QUIET_NONE); /* a dead daemon's wish must not outlive it */
    if (sock < 0 || job->path[0] == '\0') {
        if (sock >= 0) close(sock);
        return;
    }
    memset(&address, 0, sizeof(address));
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, job->path, sizeof(address.sun_path));
    memset(&hello, 0, sizeof(hello));
    memcpy(hello.magic, FLOWSLOT_MAGIC, sizeof(hello.magic));
    memcpy(hello.job, job->job, sizeof(hello.job));
    hello.version = FLOWSLOT_VERSION;
    hello.type = FLOWSLOT_REGISTER;
    hello.rank = job->rank;
    hello.slots = job->slots;
    data.iov_base = &hello;
    data.iov_len = sizeof(hello);
    memset(&message, 0, sizeof(message));
    memset(&control, 0, sizeof(control));
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof(control.bytes);
    rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &job->memfd, sizeof(int));
    /* dup3: the descriptor keeps its number, so that a doorbell which another thread rings at this
     * moment can never end up in a data socket of the library. */
    if (connect(sock, (const struct sockaddr *)&address, sizeof(address)) == 0 &&
        sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof(hello) &&
        dup3(sock, job->sock, O_CLOEXEC) >= 0)
        FLOWSLOT_SET(job->link, FLOWSLOT_ASKED);
    close(sock);
}

/* Take what the daemon said: its answers, or that it has gone. */
static inline void flowslot__hear(struct flowslot *job) {
    struct flowslot_reply reply;
    uint32_t i;
    for (;;) {
        ssize_t n = recv(job->sock, &reply, sizeof(reply), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            flowslot__leave(job, FLOWSLOT_RETRY_NS, "");
            return;
        }
        reply.cc[sizeof(reply.cc) - 1] = reply.reason[sizeof(reply.reason) - 1] = '\0';
        if (n != (ssize_t)sizeof(reply) || memcmp(reply.magic, FLOWSLOT_MAGIC, 8) != 0 ||
            reply.version != FLOWSLOT_VERSION || reply.type != FLOWSLOT_REPLY) {
            flowslot__leave(job, FLOWSLOT_REFUSED_NS, "reply of an unknown version");
            return;
        }
        if (reply.status != 0) {
            flowslot__leave(job, FLOWSLOT_REFUSED_NS, reply.reason);
            return;
        }
        memcpy(job->cc, reply.cc, sizeof(job->cc));
        FLOWSLOT_SET(job->link, FLOWSLOT_REGISTERED);
        for (i = 0; i < job->slots; i++) flowslot__enlist(job, flowslot__slots(job) + i);
    }
}

static inline void flowslot__lock(struct flowslot *job) {
    while (__atomic_exchange_n(&job->busy, 1u, __ATOMIC_ACQUIRE)) sched_yield();
}

static inline void flowslot__unlock(struct flowslot *job) {
    __atomic_store_n(&job->busy, 0u, __ATOMIC_RELEASE);
}

/* ---- The job ----------------------------------------------------------------------------- */

/* A memfd that can neither shrink nor grow: a shrinking one would kill its reader with SIGBUS. */
static inline int flowslot__memfd(size_t size) {
    /* Through syscall(): glibc has the function only since 2.27. 8: MFD_NOEXEC_SEAL, Linux 6.3. */
    int fd = (int)syscall(SYS_memfd_create, "flowslot", MFD_CLOEXEC | MFD_ALLOW_SEALING | 8u);
    if (fd < 0 && errno == EINVAL)
        fd = (int)syscall(SYS_memfd_create, "flowslot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 &&
        (ftruncate(fd, (off_t)size) != 0 ||
         fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

static inline size_t flowslot__bytes(uint32_t slots) {
    return sizeof(struct flowslot_header) + (size_t)slots * sizeof(struct flowslot_slot);
}

/*
 * Make the record and look for a daemon. `path` NULL: $FLOWSLOT_SOCKET, else the system's socket.
 * `name` and `rank` name the process; a name of more than 31 characters, or of others than visible
 * ASCII, ends with a hash of the whole. At most `slots` (1 to 4096) flows can be open at a time. 0,
 * or -1 when there is no memory to share: then `job` may be
 * used all the same, and every call does nothing.
 */
static inline int flowslot_open(struct flowslot *job, const char *path, const char *name,
                                int32_t rank, uint32_t slots) {
    int saved = errno;
    void *memory = MAP_FAILED;
    memset(job, 0, sizeof(*job));
    if (path == NULL) path = getenv("FLOWSLOT_SOCKET");
    if (path == NULL || path[0] == '\0') path = FLOWSLOT_DEFAULT_PATH;
    if (strlen(path) < sizeof(job->path)) memcpy(job->path, path, strlen(path));
    flowslot__name(job->job, name[0] != '\0' ? name : "_");
    job->slots = slots;
    job->rank = rank;
    job->sock = flowslot__socket();
    job->memfd = flowslot__memfd(flowslot__bytes(slots));
    if (job->sock >= 0 && job->memfd >= 0)
        memory = mmap(NULL, flowslot__bytes(slots), PROT_READ | PROT_WRITE, MAP_SHARED, job->memfd,
                      0);
    if (memory == MAP_FAILED) {
        if (job->sock >= 0) close(job->sock);
        if (job->memfd >= 0) close(job->memfd);
        errno = saved;
        return -1;
    }
    job->header = (struct flowslot_header *)memory;
    memcpy(job->header->magic, FLOWSLOT_MAGIC, sizeof(job->header->magic));
    job->header->version = FLOWSLOT_VERSION;
    job->header->slots = slots;
    job->header->pid = (int32_t)getpid();
    job->header->start_ns = flowslot__now(CLOCK_REALTIME);
    flowslot_poll(job);
    errno = saved;
    return 0;
}

/*
 * Connect, register or hear the daemon, whatever is next, in one to three system calls; 1 when
 * registered. flowslot_begin() calls it: call it only to be known earlier. A daemon that came
 * (back) may have another congestion control: all live sockets are then enlisted with it.
 */
static inline int flowslot_poll(struct flowslot *job) {
    int saved = errno;
    if (job->header == NULL) return 0;
    if (!__atomic_exchange_n(&job->busy, 1u, __ATOMIC_ACQUIRE)) { /* else: another thread polls */
        if (job->link == FLOWSLOT_ABSENT && flowslot__now(CLOCK_MONOTONIC) >= job->retry_ns)
            flowslot__connect(job);
        if (job->link != FLOWSLOT_ABSENT) flowslot__hear(job);
        flowslot__unlock(job);
    }
    errno = saved;
    return FLOWSLOT_GET(job->link) == FLOWSLOT_REGISTERED;
}

/* Leave the daemon, which forgets all of this job's flows; calls on them then do nothing. */
static inline void flowslot_close(struct flowslot *job) {
    int saved = errno;
    if (job->header == NULL) return;
    munmap(job->header, flowslot__bytes(job->slots));
    close(job->sock);
    close(job->memfd);
    job->header = NULL;
    errno = saved;
}

/* ---- Its flows --------------------------------------------------------------------------- */

/* An end's address; IPv4 also when a dual-stack socket shows it as ::ffff:a.b.c.d. */
static inline uint8_t flowslot__address(const struct sockaddr_storage *from, uint8_t ip[16],
                                        uint16_t *port) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    if (from->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)from;
        memcpy(ip, &v4->sin_addr, 4);
        *port = ntohs(v4->sin_port);
        return AF_INET;
    }
    if (from->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)from;
        const uint8_t *bytes = (const uint8_t *)&v6->sin6_addr;
        int is_v4 = memcmp(bytes, mapped, sizeof(mapped)) == 0;
        memcpy(ip, bytes + (is_v4 ? 12 : 0), is_v4 ? 4 : 16);
        *port = ntohs(v6->sin6_port);
        return is_v4 ? AF_INET : AF_INET6;
    }
    return 0;
}

/*
 * Report the connected socket `fd` (TCP or UDP; -1: not a socket, as with RDMA) to rank `peer`. When
 * the daemon paces, its congestion control is selected on a TCP socket, now or as soon as it appears.
 * 0, or -1 when all slots are taken: then the flow goes unreported, and its calls do nothing.
 */
static inline int flowslot_flow_open(struct flowslot *job, struct flowslot_flow *flow, int fd,
                                     int32_t peer, int32_t channel, enum flowslot_role role) {
    struct flowslot_slot value;
    struct sockaddr_storage here, there;
    socklen_t here_size = sizeof(here), there_size = sizeof(there), size = sizeof(uint64_t);
    uint32_t i;
    int saved = errno, type = 0;

    flow->job = job;
    flow->slot = NULL;
    if (job->header == NULL) return -1;
    memset(&value, 0, sizeof(value));
    value.state = FLOWSLOT_IDLE;
    value.role = (uint16_t)role;
    memcpy(value.job, job->job, sizeof(value.job));
    value.rank = job->rank;
    value.peer = peer;
    value.channel = channel;
    value.fd = fd < 0 ? -1 : fd;
    if (fd < 0) {
        value.transport = FLOWSLOT_RDMA;
    } else if (getsockname(fd, (struct sockaddr *)&here, &here_size) == 0 &&
               getpeername(fd, (struct sockaddr *)&there, &there_size) == 0) {
        (void)getsockopt(fd, SOL_SOCKET, SO_COOKIE, &value.sock_cookie, &size);
        value.family = flowslot__address(&here, value.src, &value.sport);
        (void)flowslot__address(&there, value.dst, &value.dport);
        size = sizeof(type);
        (void)getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
        if (value.family && type == SOCK_STREAM) value.transport = FLOWSLOT_TCP;
        if (value.family && type == SOCK_DGRAM) value.transport = FLOWSLOT_UDP;
    }
    flowslot__lock(job);
    for (i = 0; i < job->slots && flow->slot == NULL; i++)
        if (FLOWSLOT_GET(flowslot__slots(job)[i].state) == FLOWSLOT_FREE)
            flow->slot = flowslot__slots(job) + i;
    if (flow->slot != NULL) {
        flowslot__write(flow->slot, &value);
        flowslot__enlist(job, flow->slot);
    }
    flowslot__unlock(job);
    errno = saved;
    return flow->slot != NULL ? 0 : -1;
}

static inline int flowslot__live(const struct flowslot_flow *flow) {
    return flow->slot != NULL && flow->job->header != NULL;
}

/* The flow ends. Call it before the socket is closed. */
static inline void flowslot_flow_close(struct flowslot_flow *flow) {
    struct flowslot_slot value;
    if (!flowslot__live(flow)) return;
    memset(&value, 0, sizeof(value));
    flowslot__lock(flow->job);
    flowslot__write(flow->slot, &value);
    flowslot__unlock(flow->job);
    flowslot__ring(flow, FLOWSLOT_END);
    flow->slot = NULL;
}

/*
 * The flow's part in its job, where it becomes known, or another, only while the flow is open; -1 (of
 * `collective`: 0) is not known. What is as it was costs nothing.
 */
static inline void flowslot_flow_part(struct flowslot_flow *flow, int32_t rank, int32_t peer,
                                      int32_t channel, uint32_t collective) {
    struct flowslot_slot *slot = flow->slot;
    if (!flowslot__live(flow)) return;
    if (FLOWSLOT_GET(slot->rank) == rank && FLOWSLOT_GET(slot->peer) == peer &&
        FLOWSLOT_GET(slot->channel) == channel && FLOWSLOT_GET(slot->collective) == collective)
        return;
    flowslot__write_begin(slot);
    FLOWSLOT_SET(slot->rank, rank);
    FLOWSLOT_SET(slot->peer, peer);
    FLOWSLOT_SET(slot->channel, channel);
    FLOWSLOT_SET(slot->collective, collective);
    flowslot__write_end(slot);
}

/*
 * A new iteration begins, in which `total` bytes are expected (0: unknown); the counts start again
 * from 0. Numbers may skip, or fall (back to a checkpoint). For the iteration that is already running this only corrects the total.
 */
static inline void flowslot_begin(struct flowslot_flow *flow, uint64_t iteration, uint64_t total) {
    struct flowslot_slot *slot = flow->slot;
    if (!flowslot__live(flow)) return;
    flowslot_poll(flow->job);
    flowslot__write_begin(slot);
    if (FLOWSLOT_GET(slot->iteration) != iteration ||
        FLOWSLOT_GET(slot->t_iteration_start_ns) == 0) {
        FLOWSLOT_SET(slot->state, FLOWSLOT_IDLE);
        FLOWSLOT_SET(slot->iteration, iteration);
        FLOWSLOT_SET(slot->ready, UINT64_C(0));
        FLOWSLOT_SET(slot->posted, UINT64_C(0));
        FLOWSLOT_SET(slot->done, UINT64_C(0));
        FLOWSLOT_SET(slot->t_iteration_start_ns, flowslot__now(CLOCK_MONOTONIC));
    }
    if (total != 0 && total < FLOWSLOT_GET(slot->ready)) total = FLOWSLOT_GET(slot->ready);
    FLOWSLOT_SET(slot->iteration_total, total);
    flowslot__write_end(slot);
}

/*
 * Add to the counts of this iteration. A library may report fewer than all three: what is done
 * was posted, and what was posted was ready. The flow is active from its first ready byte until
 * the iteration's total (or, where that is unknown, all that is ready) is done.
 */
static inline void flowslot_progress_add(struct flowslot_flow *flow, uint64_t ready,
                                         uint64_t posted, uint64_t done) {
    struct flowslot_slot *slot = flow->slot;
    uint64_t total;
    uint16_t before, after;
    if (!flowslot__live(flow)) return;
    done += FLOWSLOT_GET(slot->done);
    posted += FLOWSLOT_GET(slot->posted);
    if (posted < done) posted = done;
    ready += FLOWSLOT_GET(slot->ready);
    if (ready < posted) ready = posted;
    total = FLOWSLOT_GET(slot->iteration_total);
    if (total != 0 && total < ready) total = ready;
    before = FLOWSLOT_GET(slot->state);
    after = done < (total != 0 ? total : ready) && ready != 0 ? FLOWSLOT_ACTIVE : FLOWSLOT_IDLE;
    flowslot__write_begin(slot);
    if (FLOWSLOT_GET(slot->ready) == 0 && ready != 0)
        FLOWSLOT_SET(slot->phases, FLOWSLOT_GET(slot->phases) + 1);
    FLOWSLOT_SET(slot->state, after);
    FLOWSLOT_SET(slot->ready, ready);
    FLOWSLOT_SET(slot->posted, posted);
    FLOWSLOT_SET(slot->done, done);
    FLOWSLOT_SET(slot->iteration_total, total);
    flowslot__write_end(slot);
    if (after != before)
        flowslot__ring(flow, after == FLOWSLOT_ACTIVE ? FLOWSLOT_BEGIN : FLOWSLOT_END);
}

/* n more bytes may be sent. */
static inline void flowslot_ready(struct flowslot_flow *flow, uint64_t n) {
    flowslot_progress_add(flow, n, 0, 0);
}

/* n more bytes were handed to the transport. */
static inline void flowslot_posted(struct flowslot_flow *flow, uint64_t n) {
    flowslot_progress_add(flow, 0, n, 0);
}

/* n more bytes were completed by the transport. */
static inline void flowslot_done(struct flowslot_flow *flow, uint64_t n) {
    flowslot_progress_add(flow, 0, 0, n);
}

#endif /* FLOWSLOT_SHM_H */
