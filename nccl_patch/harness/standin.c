/* SPDX-License-Identifier: Apache-2.0 */
#include "standin.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WAITING = 128 }; /* connections that have not said yet who they are */
static const uint64_t MAGIC = 0x7374616e64696e31u;

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct handle {
    uint64_t magic;
    union address at;
    int lanes, helpers;
    struct comm *connecting; /* the connecting side's */
};
_Static_assert(sizeof(struct handle) <= NET_HANDLE, "handle");

struct hello {
    uint64_t magic;
    int lane; /* -1: control */
};

struct listener {
    int fd, lanes, helpers, waiting;
    int strangers[WAITING];
    struct comm *accepting;
};

static union address own;
static char interface[IF_NAMESIZE];

static int setting(const char *name, int otherwise, int most) {
    const char *text = getenv(name);
    int value = text == NULL || *text == '\0' ? otherwise : atoi(text);
    return value < 0 ? 0 : value > most ? most : value;
}

static bool wanted_interface(const struct ifaddrs *at) {
    const char *name = getenv("NCCL_SOCKET_IFNAME"), *family = getenv("NCCL_SOCKET_FAMILY");
    int only = family == NULL ? 0 : strcmp(family, "AF_INET6") == 0 ? AF_INET6 : AF_INET;
    if (at->ifa_addr == NULL || (at->ifa_flags & IFF_UP) == 0) return false;
    if (at->ifa_addr->sa_family != AF_INET && at->ifa_addr->sa_family != AF_INET6) return false;
    if (only != 0 && at->ifa_addr->sa_family != only) return false;
    if (name == NULL || *name == '\0') return (at->ifa_flags & IFF_LOOPBACK) == 0;
    return strncmp(at->ifa_name, name + (*name == '='), strlen(name + (*name == '='))) == 0;
}

int standin_init(void) {
    struct ifaddrs *all, *at;
    int result = NET_SYSTEM_ERROR;
    if (getifaddrs(&all) != 0) return result;
    for (at = all; at != NULL && result != NET_OK; at = at->ifa_next) {
        if (!wanted_interface(at)) continue;
        memcpy(&own, at->ifa_addr,
               at->ifa_addr->sa_family == AF_INET ? sizeof(own.v4) : sizeof(own.v6));
        strncpy(interface, at->ifa_name, sizeof(interface) - 1);
        result = NET_OK;
    }
    freeifaddrs(all);
    return result;
}

const char *standin_interface(void) {
    return interface;
}

/* ---- Connections ---------------------------------------------------------------------------- */

static socklen_t length(const union address *at) {
    return at->any.sa_family == AF_INET ? sizeof(at->v4) : sizeof(at->v6);
}

static int fresh_socket(int family) {
    return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

int standin_listen(void *handle, void **comm) {
    struct listener *listener = calloc(1, sizeof(*listener));
    struct handle *out = handle;
    socklen_t size = sizeof(out->at);
    if (listener == NULL) return NET_SYSTEM_ERROR;
    memset(out, 0, NET_HANDLE);
    listener->helpers = setting("NCCL_SOCKET_NTHREADS", 0, MOST_HELPERS);
    listener->lanes = setting("NCCL_NSOCKS_PERTHREAD", listener->helpers > 0, MOST_LANES);
    if (listener->helpers > 0) listener->lanes *= listener->helpers;
    if (listener->lanes > MOST_LANES) listener->lanes = MOST_LANES;
    listener->fd = fresh_socket(own.any.sa_family);
    if (listener->fd < 0 || bind(listener->fd, &own.any, length(&own)) != 0 ||
        listen(listener->fd, SOMAXCONN) != 0 ||
        getsockname(listener->fd, &out->at.any, &size) != 0) {
        if (listener->fd >= 0) close(listener->fd);
        free(listener);
        return NET_SYSTEM_ERROR;
    }
    out->magic = MAGIC;
    out->lanes = listener->lanes;
    out->helpers = listener->helpers;
    *comm = listener;
    return NET_OK;
}

static struct comm *fresh_comm(bool sending, int lanes, int helpers) {
    struct comm *comm = calloc(1, sizeof(*comm));
    int i;
    if (comm == NULL) return NULL;
    comm->sending = sending;
    comm->lanes = lanes;
    comm->helpers = helpers < lanes ? helpers : lanes;
    comm->control = -1;
    for (i = 0; i < MOST_LANES; i++) comm->lane[i].fd = -1;
    return comm;
}

static int *socket_of(struct comm *comm, int lane) {
    return lane < 0 ? &comm->control : &comm->lane[lane].fd;
}

static int start_helpers(struct comm *comm) {
    int i;
    for (i = 0; i < comm->helpers; i++) {
        struct helper *helper = &comm->helper[i];
        helper->comm = comm;
        pthread_mutex_init(&helper->lock, NULL);
        pthread_cond_init(&helper->filled, NULL);
        if (pthread_create(&helper->thread, NULL, standin_help, helper) != 0) {
            comm->helpers = i;
            return NET_SYSTEM_ERROR;
        }
    }
    return NET_OK;
}

/* A connection says which lane it is. 1: it has; 0: later; -1: it can't. */
static int greet(int fd, int lane) {
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    struct hello hello = {.magic = MAGIC, .lane = lane};
    int error = 0, one = 1;
    socklen_t size = sizeof(error);
    if (poll(&ready, 1, 0) == 0) return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello) ? 1 : -1;
}

static int connect_lanes(struct comm *comm, const union address *at) {
    int lane;
    for (lane = -1; lane < comm->lanes; lane++) {
        int *fd = socket_of(comm, lane);
        *fd = fresh_socket(at->any.sa_family);
        if (*fd < 0) return NET_SYSTEM_ERROR;
        if (connect(*fd, &at->any, length(at)) != 0 && errno != EINPROGRESS)
            return NET_REMOTE_ERROR;
    }
    return NET_OK;
}

int standin_connect(void *handle, void **comm) {
    struct handle *to = handle;
    struct comm *new = to->connecting;
    int result = NET_OK;
    *comm = NULL;
    if (to->magic != MAGIC) return NET_INVALID_ARGUMENT;
    if (new == NULL) {
        new = to->connecting = fresh_comm(true, to->lanes, to->helpers);
        if (new == NULL) return NET_SYSTEM_ERROR;
        result = connect_lanes(new, &to->at);
    }
    for (; result == NET_OK && new->greeted <= new->lanes; new->greeted++) {
        int said = greet(*socket_of(new, new->greeted - 1), new->greeted - 1);
        if (said == 0) return NET_OK;
        if (said < 0) result = NET_REMOTE_ERROR;
    }
    if (result == NET_OK) result = start_helpers(new);
    to->connecting = NULL;
    if (result == NET_OK)
        *comm = new;
    else
        standin_close(new);
    return result;
}

static void forget(struct listener *listener, int i) {
    memmove(&listener->strangers[i], &listener->strangers[i + 1],
            sizeof(int) * (size_t)(--listener->waiting - i));
}

static void let_in(struct listener *listener) {
    int fd;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (listener->waiting == WAITING) { /* the oldest has had its time */
            close(listener->strangers[0]);
            forget(listener, 0);
        }
        listener->strangers[listener->waiting++] = fd;
    }
}

int standin_accept(void *listening, void **comm) {
    struct listener *listener = listening;
    struct comm *new = listener->accepting;
    struct hello hello;
    int i, one = 1;
    *comm = NULL;
    if (new == NULL)
        new = listener->accepting = fresh_comm(false, listener->lanes, listener->helpers);
    if (new == NULL) return NET_SYSTEM_ERROR;
    let_in(listener);
    for (i = 0; i < listener->waiting; i++) {
        int fd = listener->strangers[i], *place = NULL;
        ssize_t n = recv(fd, &hello, sizeof(hello), 0);
        if (n < 0 && errno == EAGAIN) continue;
        if (n == sizeof(hello) && hello.magic == MAGIC && hello.lane >= -1 &&
            hello.lane < new->lanes && *socket_of(new, hello.lane) < 0)
            place = socket_of(new, hello.lane);
        forget(listener, i--);
        if (place == NULL) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        *place = fd;
        new->greeted++;
    }
    if (new->greeted <= new->lanes) return NET_OK;
    listener->accepting = NULL;
    *comm = new;
    return start_helpers(new);
}

int standin_close_listen(void *listening) {
    struct listener *listener = listening;
    while (listener->waiting > 0) close(listener->strangers[--listener->waiting]);
    if (listener->accepting != NULL) standin_close(listener->accepting);
    close(listener->fd);
    free(listener);
    return NET_OK;
}

int standin_close(void *closed) {
    struct comm *comm = closed;
    int i;
    for (i = 0; i < comm->helpers && comm->helper[i].comm != NULL; i++) {
        struct helper *helper = &comm->helper[i];
        pthread_mutex_lock(&helper->lock);
        comm->stop = true;
        pthread_cond_signal(&helper->filled);
        pthread_mutex_unlock(&helper->lock);
        pthread_join(helper->thread, NULL);
        pthread_mutex_destroy(&helper->lock);
        pthread_cond_destroy(&helper->filled);
    }
    for (i = -1; i < MOST_LANES; i++)
        if (*socket_of(comm, i) >= 0) close(*socket_of(comm, i));
    free(comm);
    return NET_OK;
}
