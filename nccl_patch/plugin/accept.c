/* SPDX-License-Identifier: Apache-2.0 */
/*
 * accept.c - who connects is a stranger until its hello has come. Strangers that say something else
 * are dropped at once, those that say nothing after some seconds; neither delays anybody.
 */
#include "setup.h"

static void drop_stranger(struct listener *listener, int i) {
    close(listener->strangers[i].fd);
    listener->strangers[i] = listener->strangers[--listener->stranger_count];
}

/* Says so once for each listener: there may be thousands. */
static void complain(struct listener *listener, const struct stranger *stranger, const char *why) {
    char peer[MOST_TEXT];
    if (listener->complained) return;
    listener->complained = true;
    address_text(peer, &stranger->address);
    warn("dropped a connection from %s: %s. If that is a host of this job, it does not use the "
         "plugin flowslot, or another version of it", peer, why);
}

static void free_party(struct party *party, int lanes) {
    for (int i = 0; i <= lanes; i++)
        if (party->fds[i] >= 0) close(party->fds[i]);
    party->connection = 0;
}

static struct party *find_party(struct listener *listener, uint64_t connection) {
    struct party *free_one = NULL;
    for (int i = 0; i < MOST_PARTIES; i++) {
        struct party *party = &listener->parties[i];
        if (party->connection == connection) return party;
        if (party->connection == 0 && free_one == NULL) free_one = party;
    }
    if (free_one == NULL) return NULL;
    *free_one = (struct party){.connection = connection};
    for (int i = 0; i <= MOST_LANES; i++) free_one->fds[i] = -1;
    return free_one;
}

/* A whole hello: NULL and the lane has found its place, or what is wrong with it. */
static const char *welcome(struct listener *listener, const struct stranger *stranger) {
    const struct wire_hello *hello = &stranger->hello;
    struct party *party;
    int lane = le16toh(hello->lane);
    if (le64toh(hello->magic) != WIRE_MAGIC) return "it speaks another protocol";
    if (le32toh(hello->version) != WIRE_VERSION) return "it has another version of the protocol";
    if (memcmp(hello->key, listener->key, WIRE_KEY) != 0) return "it does not have this job's key";
    if (le16toh(hello->lanes) != listener->lanes || lane > listener->lanes)
        return "it counts sockets differently";
    if (hello->connection == 0) return "it has no connection's number";
    party = find_party(listener, hello->connection);
    if (party == NULL) return "too many connections are being made";
    if (party->fds[lane] >= 0) return "it has a socket twice";
    setup_socket(stranger->fd);
    party->fds[lane] = stranger->fd;
    party->address = stranger->address;
    party->came++;
    return NULL;
}

/* What has come from stranger `i`? Whether there is another one in its place now. */
static bool hear(struct listener *listener, int i, uint64_t now) {
    struct stranger *stranger = &listener->strangers[i];
    char *to = (char *)&stranger->hello;
    ssize_t n = recv(stranger->fd, to + stranger->have, sizeof(stranger->hello) - stranger->have,
                     MSG_DONTWAIT);
    const char *wrong = NULL;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (now < stranger->until) return false;
        wrong = "it said nothing";
    } else if (n <= 0) {
        drop_stranger(listener, i); /* it has gone again */
        return true;
    } else {
        stranger->have += (size_t)n;
        if (stranger->have >= sizeof(uint64_t) && le64toh(stranger->hello.magic) != WIRE_MAGIC)
            wrong = "it speaks another protocol";
        else if (stranger->have < sizeof(stranger->hello))
            return false;
        else
            wrong = welcome(listener, stranger);
        if (wrong == NULL) {
            *stranger = listener->strangers[--listener->stranger_count];
            return true;
        }
    }
    complain(listener, stranger, wrong);
    drop_stranger(listener, i);
    return true;
}

static int take_in(struct listener *listener) {
    uint64_t now = now_ns();
    for (;;) {
        struct stranger *stranger;
        struct sockaddr_storage address;
        socklen_t size = sizeof(address);
        int fd = accept4(listener->fd, (struct sockaddr *)&address, &size,
                         SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno == EAGAIN) return NET_OK;
        if (fd < 0 && listener->stranger_count > 0) { /* out of descriptors: strangers go first */
            drop_stranger(listener, 0);
            continue;
        }
        if (fd < 0) {
            warn("cannot accept a connection: %s", strerror(errno));
            return NET_SYSTEM_ERROR;
        }
        if (listener->stranger_count == MOST_STRANGERS) drop_stranger(listener, 0);
        stranger = &listener->strangers[listener->stranger_count++];
        *stranger = (struct stranger){.fd = fd, .address = address};
        stranger->until = now + SILENT_S * UINT64_C(1000000000);
        (void)hear(listener, listener->stranger_count - 1, now);
    }
}

/* A comm of which not all lanes have come: is its other end still there? */
static int check_party(struct listener *listener, struct party *party) {
    char peer[MOST_TEXT], byte;
    for (int i = 0; i <= listener->lanes; i++) {
        int fd = party->fds[i];
        ssize_t n;
        if (fd < 0) continue;
        n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) continue;
        address_text(peer, &party->address);
        warn("%s went away while it connected", peer);
        free_party(party, listener->lanes);
        return NET_REMOTE_ERROR;
    }
    return NET_OK;
}

static int look(struct listener *listener, uint64_t now) {
    for (int i = 0; i < listener->stranger_count;) i += !hear(listener, i, now);
    return take_in(listener);
}

void setup_beat(struct listener *listener) {
    struct wire_note note = {.magic = htole32(WIRE_WAIT)};
    if (pthread_mutex_trylock(&listener->lock) != 0) return; /* accept is called just now */
    (void)look(listener, now_ns());
    for (int i = 0; i < MOST_PARTIES; i++) {
        struct party *party = &listener->parties[i];
        int control = party->fds[listener->lanes];
        if (party->connection != 0 && control >= 0)
            (void)!send(control, &note, sizeof(note), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    pthread_mutex_unlock(&listener->lock);
}

/* All lanes of one other end; `party->connection` is 0 when there is none. The lock is held. */
static int next_party(struct listener *listener, struct party *party) {
    uint64_t now = now_ns(), most = (uint64_t)options.timeout_ms * PATIENCE;
    int result;
    party->connection = 0;
    if (listener->until == 0) listener->until = now + most * 1000000u;
    result = look(listener, now);
    for (int i = 0; i < MOST_PARTIES && result == NET_OK; i++) {
        struct party *one = &listener->parties[i];
        if (one->connection == 0) continue;
        if (one->came <= listener->lanes) {
            result = check_party(listener, one);
            continue;
        }
        *party = *one;
        one->connection = 0; /* its sockets are the comm's now */
        listener->until = 0;
        return NET_OK;
    }
    if (result == NET_OK && now > listener->until) {
        warn("nobody has connected for %d s (%d times FLOWSLOT_NCCL_TIMEOUT): is a host of this job "
             "gone?", (int)(most / 1000), PATIENCE);
        result = NET_REMOTE_ERROR;
    }
    return result;
}

int setup_accept(void *of, void **to) {
    struct listener *listener = of;
    struct comm *comm = NULL;
    struct party party;
    int result;
    if (listener == NULL || to == NULL) return NET_BAD_ARGUMENT;
    *to = NULL;
    pthread_mutex_lock(&listener->lock);
    result = next_party(listener, &party);
    pthread_mutex_unlock(&listener->lock);
    if (result != NET_OK || party.connection == 0) return result;
    result = comm_new(&comm, false, listener->context, &party.address, party.fds, listener->lanes,
                      listener->threads);
    if (result == NET_OK) *to = comm;
    return result;
}

int setup_close_listen(void *of) {
    struct listener *listener = of;
    if (listener == NULL) return NET_OK;
    watch_forget(listener);
    while (listener->stranger_count > 0) drop_stranger(listener, 0);
    for (int i = 0; i < MOST_PARTIES; i++)
        if (listener->parties[i].connection != 0)
            free_party(&listener->parties[i], listener->lanes);
    close(listener->fd);
    pthread_mutex_destroy(&listener->lock);
    context_drop(listener->context);
    free(listener);
    return NET_OK;
}
