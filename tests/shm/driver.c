/* SPDX-License-Identifier: Apache-2.0 */
/* A job in C for the tests: `driver PATH JOB RANK SLOTS`, then one command per line of stdin, each
 * answered by one line. `stress` writes one flow as fast as it can until stdin closes. */
#include "flowslot_shm.h"

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>

#define FLOWS 64
static struct flowslot job;
static struct flowslot_flow flows[FLOWS];
static int fds[FLOWS];

/* `cc`: a congestion control, `-` for none, `udp`. */
static int connected(const char *host, int port, const char *cc) {
    struct sockaddr_in to;
    int udp = strcmp(cc, "udp") == 0, fd = socket(AF_INET, udp ? SOCK_DGRAM : SOCK_STREAM, 0);
    memset(&to, 0, sizeof(to));
    to.sin_family = AF_INET;
    to.sin_port = htons((uint16_t)port);
    inet_pton(AF_INET, host, &to.sin_addr);
    if (cc[0] != '-' && !udp)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, cc, (socklen_t)strlen(cc));
    return connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0 ? fd : -1;
}

/* ready = 3k, posted = 2k, done = k after every write, whatever k: a mix shows. */
static void stress(struct flowslot_flow *flow) {
    struct pollfd in = {0, POLLIN, 0};
    uint64_t i;
    flowslot_begin(flow, 1, 0);
    for (i = 0; i % 1000 != 0 || poll(&in, 1, 0) == 0; i++) flowslot_progress_add(flow, 3, 2, 1);
}

int main(int argc, char **argv) {
    char line[256], word[32], text[64];
    if (argc != 5) return 2;
    flowslot_open(&job, argv[1], argv[2], atoi(argv[3]), (uint32_t)atoi(argv[4]));
    while (fgets(line, sizeof(line), stdin) != NULL) {
        unsigned long long a = 0, b = 0;
        int f = 0, role = 0, port = 0, rank = 0, peer = 0, channel = 0;
        char cc[16] = "-";
        errno = 77; /* none of our calls may touch it */
        if (sscanf(line, "flow %d %63s %d %d %15s", &f, text, &port, &role, cc) == 5) {
            fds[f] = port ? connected(text, port, cc) : -1;
            errno = 77;
            printf("%d", flowslot_flow_open(&job, &flows[f], fds[f], f + 100, f,
                                            (enum flowslot_role)role));
        } else if (sscanf(line, "begin %d %llu %llu", &f, &a, &b) == 3) {
            flowslot_begin(&flows[f], a, b);
        } else if (sscanf(line, "ready %d %llu", &f, &a) == 2) {
            flowslot_ready(&flows[f], a);
        } else if (sscanf(line, "posted %d %llu", &f, &a) == 2) {
            flowslot_posted(&flows[f], a);
        } else if (sscanf(line, "done %d %llu", &f, &a) == 2) {
            flowslot_done(&flows[f], a);
        } else if (sscanf(line, "part %d %d %d %d %llu", &f, &rank, &peer, &channel, &a) == 5) {
            flowslot_flow_part(&flows[f], rank, peer, channel, (uint32_t)a);
        } else if (sscanf(line, "close %d", &f) == 1) {
            flowslot_flow_close(&flows[f]);
        } else if (sscanf(line, "cc %d", &f) == 1) {
            socklen_t size = sizeof(cc);
            memset(cc, 0, sizeof(cc));
            getsockopt(fds[f], IPPROTO_TCP, TCP_CONGESTION, cc, &size);
            printf("%.15s", cc);
            errno = 77;
        } else if (sscanf(line, "swap %d %63s %d %15s", &f, text, &port, cc) == 4) {
            close(fds[f]); /* too early: another socket gets the number */
            printf("%d", connected(text, port, cc) == fds[f]);
            errno = 77;
        } else if (sscanf(line, "flip %d %llu", &f, &a) == 2) {
            for (; a > 0; a--) {
                flowslot_ready(&flows[f], 1);
                flowslot_done(&flows[f], 1);
            }
        } else if (sscanf(line, "stress %d", &f) == 1) {
            puts("");
            fflush(stdout);
            stress(&flows[f]);
            continue;
        } else if (sscanf(line, "%31s", word) == 1 && strcmp(word, "leave") == 0) {
            flowslot_close(&job);
        } else if (strcmp(word, "reason") == 0) {
            printf("%s", job.reason);
        } else if (strcmp(word, "poll") == 0) {
            printf("%d", flowslot_poll(&job));
        } else {
            printf("?");
        }
        printf("%s\n", errno == 77 ? "" : " errno!");
        fflush(stdout);
    }
    return 0;
}
