/* SPDX-License-Identifier: Apache-2.0 */
/*
 * setup.c - listen and connect; accept.c has the rest. NCCL calls connect and accept again and again
 * until they give a comm, so none of this waits.
 */
#include "setup.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>

static atomic_bool used;

bool setup_used(void) {
    return atomic_load_explicit(&used, memory_order_relaxed);
}

static void set(int fd, int level, int option, int value) {
    (void)setsockopt(fd, level, option, &value, sizeof(value));
}

/* Probes begin after half of the timeout, and go on for as long as it is: an end that was heard of
 * then, if by another connection, has been silent for the timeout when they fail. */
static void keep_alive(int fd) {
    int all = options.timeout_ms / 1000, idle = (all + 1) / 2;
    int each = all / 6 > 0 ? all / 6 : 1;
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, each);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, (all + each - 1) / each);
}

void setup_socket(int fd) {
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    keep_alive(fd);
}

static int new_socket(int family) {
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    /* Before the handshake: the window's scale depends on them. */
    if (options.send_buffer > 0) set(fd, SOL_SOCKET, SO_SNDBUF, options.send_buffer);
    if (options.receive_buffer > 0) set(fd, SOL_SOCKET, SO_RCVBUF, options.receive_buffer);
    return fd;
}

/* ---- Addresses in handles ---------------------------------------------------------------- */

static void put_address(struct wire_handle *to, const struct sockaddr_storage *from) {
    uint16_t port = 0;
    uint8_t family = flowslot__address(from, to->address, &port);
    to->family = htole16(family == AF_INET6 ? 6 : 4);
    to->port = htole16(port);
}

static bool get_address(struct sockaddr_storage *to, const struct wire_handle *from) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)to;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)to;
    uint16_t port = htons(le16toh(from->port));
    memset(to, 0, sizeof(*to));
    if (le16toh(from->family) == 4) {
        v4->sin_family = AF_INET;
        v4->sin_port = port;
        memcpy(&v4->sin_addr, from->address, 4);
    } else if (le16toh(from->family) == 6) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = port;
        memcpy(&v6->sin6_addr, from->address, 16);
    }
    return to->ss_family != AF_UNSPEC && port != 0;
}

/* ---- Listen ------------------------------------------------------------------------------ */

int setup_listen(struct context *context, int device, void *handle, void **to) {
    struct wire_handle name = {.magic = htole64(WIRE_MAGIC), .version = htole32(WIRE_VERSION)};
    struct listener *listener;
    struct sockaddr_storage address;
    socklen_t size = sizeof(address);
    if (context == NULL || handle == NULL || to == NULL || device < 0 || device >= device_count)
        return NET_BAD_ARGUMENT;
    *to = NULL;
    atomic_store(&used, true);
    listener = calloc(1, sizeof(*listener));
    if (listener == NULL) return NET_SYSTEM_ERROR;
    listener->context = context;
    pthread_mutex_init(&listener->lock, NULL);
    atomic_fetch_add(&context->users, 1);
    listener->lanes = devices[device].lanes;
    listener->threads = devices[device].threads;
    address = devices[device].address;
    listener->fd = new_socket(address.ss_family);
    /* Who connects and says nothing is never seen. */
    if (listener->fd >= 0) set(listener->fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, SILENT_S);
    if (listener->fd < 0 ||
        bind(listener->fd, (const struct sockaddr *)&address, address_size(&address)) != 0 ||
        listen(listener->fd, 4096) != 0 ||
        getsockname(listener->fd, (struct sockaddr *)&address, &size) != 0) {
        warn("cannot listen on %s: %s", devices[device].name, strerror(errno));
        if (listener->fd >= 0) close(listener->fd);
        pthread_mutex_destroy(&listener->lock);
        context_drop(context);
        free(listener);
        return NET_SYSTEM_ERROR;
    }
    for (size_t i = 0; i < WIRE_KEY; i += sizeof(uint64_t)) {
        uint64_t part = random64();
        memcpy(listener->key + i, &part, sizeof(part));
    }
    memcpy(name.key, listener->key, WIRE_KEY);
    name.lanes = htole16((uint16_t)listener->lanes);
    put_address(&name, &address);
    if (!watch_listen(listener)) {
        warn("cannot start a thread");
        (void)setup_close_listen(listener);
        return NET_SYSTEM_ERROR;
    }
    memcpy(handle, &name, sizeof(name));
    *to = listener;
    return NET_OK;
}

/* ---- Connect ----------------------------------------------------------------------------- */

/* The control connection is there once the other end's accept has answered: who connects to an end
 * that never accepts would not hear of its death. */
enum step { CLOSED, CONNECTING, SAYING_HELLO, AWAITING_ANSWER, CONNECTED };

struct attempt {
    uint64_t ticket;
    struct context *context;
    struct sockaddr_storage address;
    char peer[MOST_TEXT];
    int lanes, threads, retried;
    /* ns. since: it began, or the other end may answer; asked: by NCCL, last */
    uint64_t since, next_try, asked;
    struct {
        int fd;
        enum step step;
        struct wire_hello hello;
        size_t said;
    } sockets[MOST_LANES + 1];
    struct attempt *next;
};

static struct attempt *attempts;
static pthread_mutex_t attempts_lock = PTHREAD_MUTEX_INITIALIZER;

static void attempt_free(struct attempt *attempt) {
    for (int i = 0; i <= attempt->lanes; i++)
        if (attempt->sockets[i].fd >= 0) close(attempt->sockets[i].fd);
    free(attempt);
}

/* Take it out of the list: by its ticket; 0: any of this context that nobody asked for since. */
static struct attempt *attempt_take(struct context *context, uint64_t ticket, uint64_t since) {
    struct attempt **at, *found = NULL;
    pthread_mutex_lock(&attempts_lock);
    for (at = &attempts; *at != NULL && found == NULL; at = found ? at : &(*at)->next) {
        if ((*at)->context != context || (*at)->asked > since) continue;
        if (ticket != 0 && (*at)->ticket != ticket) continue;
        found = *at;
        *at = found->next;
    }
    pthread_mutex_unlock(&attempts_lock);
    return found;
}

static void attempt_keep(struct attempt *attempt) {
    attempt->asked = now_ns();
    pthread_mutex_lock(&attempts_lock);
    attempt->next = attempts;
    attempts = attempt;
    pthread_mutex_unlock(&attempts_lock);
}

static void forget_since(struct context *context, uint64_t since) {
    struct attempt *attempt;
    while ((attempt = attempt_take(context, 0, since)) != NULL) attempt_free(attempt);
}

void setup_forget(struct context *context) {
    forget_since(context, UINT64_MAX);
}

/* The handle comes from the other end: a plugin's, or whatever another transport put there. */
static int attempt_new(struct context *context, int device, const struct wire_handle *handle,
                       struct attempt **to) {
    struct attempt *attempt;
    struct sockaddr_storage other;
    uint64_t connection = random64();
    if (le64toh(handle->magic) != WIRE_MAGIC) {
        char peer[MOST_TEXT] = "a host";
        memcpy(&other, handle, sizeof(*handle)); /* NCCL's own handle begins with an address */
        if (other.ss_family == AF_INET || other.ss_family == AF_INET6) address_text(peer, &other);
        warn("%s does not use the plugin flowslot: install it on every host, and set "
             "NCCL_NET_PLUGIN there, or on none", peer);
        return NET_REMOTE_ERROR;
    }
    if (le32toh(handle->version) != WIRE_VERSION || le16toh(handle->lanes) < 1 ||
        le16toh(handle->lanes) > MOST_LANES || !get_address(&other, handle)) {
        warn("the other end's handle is of version %u with %u sockets; it must be of version %u "
             "with 1 to %d: install the same plugin on every host",
             le32toh(handle->version), le16toh(handle->lanes), WIRE_VERSION, MOST_LANES);
        return NET_REMOTE_ERROR;
    }
    attempt = calloc(1, sizeof(*attempt));
    if (attempt == NULL) return NET_SYSTEM_ERROR;
    attempt->context = context;
    attempt->address = other;
    attempt->lanes = le16toh(handle->lanes);
    attempt->threads = devices[device].threads;
    attempt->ticket = random64() | 1;
    attempt->since = now_ns();
    address_text(attempt->peer, &other);
    for (int i = 0; i <= attempt->lanes; i++) {
        struct wire_hello *hello = &attempt->sockets[i].hello;
        attempt->sockets[i].fd = -1;
        hello->magic = htole64(WIRE_MAGIC);
        hello->version = htole32(WIRE_VERSION);
        hello->lane = htole16((uint16_t)i);
        hello->lanes = htole16((uint16_t)attempt->lanes);
        hello->connection = connection;
        memcpy(hello->key, handle->key, WIRE_KEY);
    }
    *to = attempt;
    return NET_OK;
}

/* Moves one socket forward. 0, or errno. */
static int attempt_step(struct attempt *attempt, int i) {
    const struct sockaddr *address = (const struct sockaddr *)&attempt->address;
    int fd = attempt->sockets[i].fd, error = 0;
    socklen_t size = sizeof(error);
    const char *hello = (const char *)&attempt->sockets[i].hello;
    struct wire_note note;
    ssize_t n;
    if (attempt->sockets[i].step == CLOSED) {
        fd = attempt->sockets[i].fd = new_socket(attempt->address.ss_family);
        if (fd < 0) return errno;
        setup_socket(fd);
        attempt->sockets[i].step = CONNECTING;
        if (connect(fd, address, address_size(&attempt->address)) != 0 && errno != EINPROGRESS)
            return errno;
    }
    if (attempt->sockets[i].step == CONNECTING) {
        struct pollfd ready = {fd, POLLOUT, 0};
        if (poll(&ready, 1, 0) == 0) return 0;
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) return error;
        attempt->sockets[i].step = SAYING_HELLO;
    }
    if (attempt->sockets[i].step == SAYING_HELLO) {
        n = send(fd, hello + attempt->sockets[i].said,
                 sizeof(struct wire_hello) - attempt->sockets[i].said, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
        attempt->sockets[i].said += (size_t)n;
        if (attempt->sockets[i].said < sizeof(struct wire_hello)) return 0;
        attempt->sockets[i].step = i == attempt->lanes ? AWAITING_ANSWER : CONNECTED;
        if (i == attempt->lanes) attempt->since = now_ns();
    }
    while (attempt->sockets[i].step == AWAITING_ANSWER) {
        n = recv(fd, &note, sizeof(note), MSG_PEEK | MSG_DONTWAIT); /* a note is the comm's */
        if (n == 0) return ECONNRESET;
        if (n < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
        if (n < (ssize_t)sizeof(note)) return 0;
        if (le32toh(note.magic) != WIRE_WAIT)
            attempt->sockets[i].step = CONNECTED;
        else
            (void)!recv(fd, &note, sizeof(note), MSG_DONTWAIT);
    }
    return 0;
}

/* A socket failed: try again later, as NCCL does, where that may help. */
static int attempt_failed(struct attempt *attempt, int i, int error) {
    bool again = attempt->sockets[i].step == CONNECTING &&
                 (error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH ||
                  error == ENETUNREACH);
    bool waits = now_ns() < attempt->next_try; /* for another socket's sake */
    if (!again || (!waits && attempt->retried >= options.retries)) {
        warn("cannot connect to %s: %s", attempt->peer, strerror(error));
        return attempt->sockets[i].step == CLOSED ? NET_SYSTEM_ERROR : NET_REMOTE_ERROR;
    }
    close(attempt->sockets[i].fd);
    attempt->sockets[i].fd = -1;
    attempt->sockets[i].step = CLOSED;
    attempt->sockets[i].said = 0;
    if (waits) return NET_OK;
    attempt->retried++;
    attempt->next_try =
        now_ns() + (uint64_t)options.retry_ms * 1000000u * (uint64_t)attempt->retried;
    return NET_OK;
}

/* Has the other end not given a sign of life for too long? Its plugin does once it has our hello. */
static bool is_silent(const struct attempt *attempt) {
    uint64_t timeout = (uint64_t)options.timeout_ms * 1000000u;
    if (now_ns() - attempt->since <= timeout) return false;
    return attempt->sockets[attempt->lanes].step < AWAITING_ANSWER ||
           silent_ms(attempt->sockets[attempt->lanes].fd) >= options.timeout_ms;
}

/* `all`: every socket is connected, and the other end has accepted. */
static int attempt_advance(struct attempt *attempt, bool *all) {
    uint64_t now = now_ns();
    int result = NET_OK;
    *all = true;
    for (int i = 0; i <= attempt->lanes && result == NET_OK; i++) {
        int error = 0;
        if (attempt->sockets[i].step == CLOSED && now < attempt->next_try) {
            *all = false;
            continue;
        }
        error = attempt_step(attempt, i);
        if (error != 0) result = attempt_failed(attempt, i, error);
        *all = *all && attempt->sockets[i].step == CONNECTED;
        if (error != 0) break; /* the others would fail alike: one retry for all */
    }
    if (result == NET_OK && !*all && is_silent(attempt)) {
        warn("cannot connect to %s: no sign of life for %d s (FLOWSLOT_NCCL_TIMEOUT)", attempt->peer,
             options.timeout_ms / 1000);
        result = NET_REMOTE_ERROR;
    }
    return result;
}

int setup_connect(struct context *context, int device, void *handle, void **to) {
    struct wire_handle name;
    struct attempt *attempt = NULL;
    struct comm *comm = NULL;
    int result = NET_OK, fds[MOST_LANES + 1];
    bool all;
    if (context == NULL || handle == NULL || to == NULL || device < 0 || device >= device_count)
        return NET_BAD_ARGUMENT;
    *to = NULL;
    atomic_store(&used, true);
    memcpy(&name, handle, sizeof(name));
    if (le64toh(name.magic) == WIRE_MAGIC && name.ticket != 0)
        attempt = attempt_take(context, name.ticket, UINT64_MAX);
    if (attempt == NULL) { /* versions up to 10 do not say what they have given up */
        uint64_t now = now_ns(), timeout = (uint64_t)options.timeout_ms * 1000000u;
        if (now > timeout) forget_since(context, now - timeout);
        result = attempt_new(context, device, &name, &attempt);
    }
    if (result != NET_OK) return result;
    result = attempt_advance(attempt, &all);
    if (result == NET_OK && !all) {
        name.ticket = attempt->ticket;
        memcpy(handle, &name, sizeof(name));
        attempt_keep(attempt);
        return NET_OK;
    }
    if (result == NET_OK) {
        for (int i = 0; i <= attempt->lanes; i++) {
            fds[i] = attempt->sockets[i].fd;
            attempt->sockets[i].fd = -1; /* the comm's now */
        }
        result = comm_new(&comm, true, context, &attempt->address, fds, attempt->lanes,
                          attempt->threads);
    }
    attempt_free(attempt);
    if (result == NET_OK) *to = comm;
    return result;
}
