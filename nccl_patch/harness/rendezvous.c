/* SPDX-License-Identifier: Apache-2.0 */
/* Rank 0 is where the others meet: each sends its part, and is sent all parts. */
#include "rank.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static bool send_all(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

static bool receive_all(int fd, void *data, size_t size) {
    char *at = data;
    while (size > 0) {
        ssize_t n = recv(fd, at, size, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

/* HOST:PORT, [HOST]:PORT. */
static struct addrinfo *resolve(const char *root) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    char text[256], *host = text, *port;
    snprintf(text, sizeof(text), "%s", root);
    port = strrchr(text, ':');
    if (port == NULL) return NULL;
    *port++ = '\0';
    if (host[0] == '[' && port[-2] == ']') {
        port[-2] = '\0';
        host++;
    }
    return getaddrinfo(host, port, &hints, &found) == 0 ? found : NULL;
}

static void set_limit(int fd, int limit_s) {
    struct timeval limit = {.tv_sec = limit_s};
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static bool welcome(struct rendezvous *meeting, const struct addrinfo *at, int limit_s) {
    int one = 1, missing = meeting->ranks - 1;
    int listening = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    good = listening >= 0 && bind(listening, at->ai_addr, at->ai_addrlen) == 0 &&
           listen(listening, MOST_RANKS) == 0;
    set_limit(listening, limit_s);
    while (good && missing > 0) {
        uint32_t rank = 0;
        int fd = accept(listening, NULL, NULL);
        if (fd < 0) {
            good = false;
            break;
        }
        set_limit(fd, limit_s);
        if (!receive_all(fd, &rank, sizeof(rank)) || rank == 0 ||
            rank >= (uint32_t)meeting->ranks || meeting->fds[rank] >= 0) {
            close(fd); /* a stranger */
            continue;
        }
        meeting->fds[rank] = fd;
        missing--;
    }
    if (listening >= 0) close(listening);
    return good;
}

static bool visit(struct rendezvous *meeting, const struct addrinfo *at, int limit_s) {
    int64_t until = now_ns() + limit_s * INT64_C(1000000000);
    uint32_t rank = (uint32_t)meeting->rank;
    while (now_ns() < until) {
        int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) return false;
        if (connect(fd, at->ai_addr, at->ai_addrlen) == 0) {
            set_limit(fd, limit_s);
            meeting->fds[0] = fd;
            return send_all(fd, &rank, sizeof(rank));
        }
        close(fd);
        usleep(20000);
    }
    return false;
}

bool rendezvous_open(struct rendezvous *meeting, const char *root, int rank, int ranks,
                     int limit_s) {
    struct addrinfo *at = resolve(root);
    bool good = false;
    int i;
    meeting->rank = rank;
    meeting->ranks = ranks;
    for (i = 0; i < MOST_RANKS; i++) meeting->fds[i] = -1;
    if (at != NULL)
        good = rank == 0 ? welcome(meeting, at, limit_s) : visit(meeting, at, limit_s);
    if (at != NULL) freeaddrinfo(at);
    return good;
}

bool rendezvous_gather(struct rendezvous *meeting, const void *mine, size_t size, void *all) {
    size_t whole = size * (size_t)meeting->ranks;
    int i;
    if (meeting->rank != 0)
        return send_all(meeting->fds[0], mine, size) && receive_all(meeting->fds[0], all, whole);
    memcpy(all, mine, size);
    for (i = 1; i < meeting->ranks; i++)
        if (!receive_all(meeting->fds[i], (char *)all + size * (size_t)i, size)) return false;
    for (i = 1; i < meeting->ranks; i++)
        if (!send_all(meeting->fds[i], all, whole)) return false;
    return true;
}

bool rendezvous_lost(const struct rendezvous *meeting) {
    char byte;
    int i;
    for (i = 0; i < meeting->ranks; i++) {
        ssize_t n;
        if (meeting->fds[i] < 0) continue;
        n = recv(meeting->fds[i], &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return true;
    }
    return false;
}

void rendezvous_close(struct rendezvous *meeting) {
    int i;
    for (i = 0; i < meeting->ranks; i++) {
        if (meeting->fds[i] >= 0) close(meeting->fds[i]);
        meeting->fds[i] = -1;
    }
}
