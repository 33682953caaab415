/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl-plain - sends over several TCP sockets as plainly as it can be done, to compare with: one
 * thread and one epoll on each side, 256 KiB at a time to whichever socket takes them, no messages,
 * nothing checked.
 *
 *     nccl-plain receive HOST PORT SOCKETS BYTES REPEAT
 *     nccl-plain send    HOST PORT SOCKETS BYTES REPEAT
 *
 * Both sides are given the same numbers. BYTES are sent REPEAT times; after each, the receiver
 * answers with one byte. Prints one line of JSON: seconds of each repeat, and CPU seconds of all.
 */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_SOCKETS = 64, CHUNK = 1 << 18, SLOTS = 8 };
static char *memory; /* SLOTS MiB, gone through in turn as NCCL goes through its slots */

static void die(const char *what) {
    fprintf(stderr, "nccl-plain: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double read_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static struct addrinfo *resolve(const char *host, const char *port) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, port, &hints, &found) != 0) die("HOST PORT: no such address");
    return found;
}

static void accept_all(const struct addrinfo *at, int *fds, int sockets) {
    int listening = socket(at->ai_family, SOCK_STREAM, 0), one = 1, i;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(listening, at->ai_addr, at->ai_addrlen) != 0 || listen(listening, SOMAXCONN) != 0)
        die("listen");
    for (i = 0; i < sockets; i++)
        if ((fds[i] = accept(listening, NULL, NULL)) < 0) die("accept");
    close(listening);
}

static void connect_all(const struct addrinfo *at, int *fds, int sockets) {
    int i, tries = 0, one = 1;
    for (i = 0; i < sockets; i++) {
        fds[i] = socket(at->ai_family, SOCK_STREAM, 0);
        if (connect(fds[i], at->ai_addr, at->ai_addrlen) != 0) {
            if (errno != ECONNREFUSED || ++tries > 250) die("connect");
            close(fds[i--]); /* the receiver is not there yet */
            usleep(20000);
            continue;
        }
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    }
}

/* Moves `bytes` over all sockets. */
static void move(int epoll, int sending, uint64_t bytes) {
    struct epoll_event ready[MOST_SOCKETS];
    uint64_t left = bytes, slots = (uint64_t)SLOTS << 20;
    while (left > 0) {
        int i, n = epoll_wait(epoll, ready, MOST_SOCKETS, -1);
        for (i = 0; i < n && left > 0; i++) {
            char *at = memory + (bytes - left) % slots;
            size_t size = left < CHUNK ? left : CHUNK;
            ssize_t moved = sending ? send(ready[i].data.fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                    : recv(ready[i].data.fd, at, size, MSG_DONTWAIT);
            if (moved > 0)
                left -= (uint64_t)moved;
            else if (moved == 0 || errno != EAGAIN)
                die(sending ? "send" : "receive");
        }
    }
}

/* The answer goes the other way, on the first socket. */
static void answer(int fd, int sending) {
    char byte = 0;
    ssize_t n = sending ? recv(fd, &byte, 1, 0) : send(fd, &byte, 1, MSG_NOSIGNAL);
    if (n != 1) die("answer");
}

int main(int argc, char **argv) {
    int fds[MOST_SOCKETS], sending, sockets, repeat, i, epoll = epoll_create1(0);
    uint64_t bytes;
    double began, cpu;
    if (argc != 7 || (strcmp(argv[1], "send") != 0 && strcmp(argv[1], "receive") != 0)) {
        fprintf(stderr, "nccl-plain: send|receive HOST PORT SOCKETS BYTES REPEAT\n");
        return 2;
    }
    sending = argv[1][0] == 's';
    sockets = atoi(argv[4]);
    bytes = strtoull(argv[5], NULL, 10);
    repeat = atoi(argv[6]);
    if (sockets < 1 || sockets > MOST_SOCKETS || repeat < 1 || bytes < 1) {
        fprintf(stderr, "nccl-plain: SOCKETS: must be in 1 to %d; BYTES, REPEAT: at least 1\n",
                MOST_SOCKETS);
        return 2;
    }
    memory = mmap(NULL, ((size_t)SLOTS << 20) + CHUNK, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) die("memory");
    (sending ? connect_all : accept_all)(resolve(argv[2], argv[3]), fds, sockets);
    for (i = 0; i < sockets; i++) {
        struct epoll_event event = {.events = sending ? EPOLLOUT : EPOLLIN, .data.fd = fds[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fds[i], &event);
    }
    printf("{\"seconds\":[");
    cpu = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    for (i = 0; i < repeat; i++) {
        began = read_clock(CLOCK_MONOTONIC);
        move(epoll, sending, bytes);
        answer(fds[0], sending);
        printf("%s%.6f", i ? "," : "", read_clock(CLOCK_MONOTONIC) - began);
    }
    printf("],\"cpu_s\":%.6f}\n", read_clock(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    return 0;
}
