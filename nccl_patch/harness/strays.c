/* SPDX-License-Identifier: Apache-2.0 */
/* Connections of strangers to whatever this process listens on: port scanners, health checks. */
#include "rank.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LOOKED_AT = 1024 };
static int *held;
static int held_n;

/* A third stays silent, a third talks of something else, a third has gone at once. */
static void come(const struct sockaddr *to, socklen_t length, int number) {
    static const char other[] = "GET / HTTP/1.1\r\nHost: somebody.example\r\nAccept: */*\r\n\r\n";
    int fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    if (connect(fd, to, length) != 0 && errno != EINPROGRESS) number = 0;
    if (number % 3 == 1) send(fd, other, sizeof(other) - 1, MSG_NOSIGNAL);
    if (number % 3 == 2)
        close(fd);
    else
        held[held_n++] = fd;
}

int strays_come(int many) {
    struct rlimit files;
    int fd, i, listening = 0;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (fd = 3; fd < LOOKED_AT; fd++) {
        struct sockaddr_storage to;
        socklen_t length = sizeof(to), size = sizeof(int);
        int accepts = 0;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0 || !accepts) continue;
        if (getsockname(fd, (struct sockaddr *)&to, &length) != 0) continue;
        listening++;
        held = realloc(held, sizeof(int) * (size_t)(held_n + many));
        for (i = 0; i < many && held != NULL; i++) come((struct sockaddr *)&to, length, i);
    }
    return listening;
}

void strays_go(void) {
    while (held_n > 0) close(held[--held_n]);
    free(held);
    held = NULL;
}
