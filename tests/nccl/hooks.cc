/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a patched NCCL tells, without NCCL: reads calls, and prints the iteration after each.
 * `hooks PORT` connects sockets to that port of 127.0.0.1.
 */
#include "flowslot_nccl_hooks.h"

#include <arpa/inet.h>

#include <iostream>
#include <string>
#include <vector>

using namespace flowslot_nccl_hooks;

static int Socket(int port) {
    struct sockaddr_in to = {};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_family = AF_INET;
    to.sin_port = htons((uint16_t)port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 ? fd : -1;
}

int main(int argc, char **argv) {
    std::vector<Connection *> made;
    std::vector<std::vector<int>> fds;
    int port = argc > 1 ? atoi(argv[1]) : 0;
    std::string what;
    uint64_t a, b, c, d, e;
    while (std::cin >> what >> a) {
        if (what == "enqueue") { /* communicator, buffer, bytes */
            std::cin >> b >> c;
            Enqueued((void *)a, 4, (void *)b, (void *)b, c);
        } else if (what == "connect") { /* communicator, rank, peer, channel, sockets */
            std::cin >> b >> c >> d >> e;
            if (a != 0) Connecting((void *)a, (int)b, (int)c, (int)d);
            made.push_back(Connected());
            fds.push_back({Socket(port)}); /* control */
            for (uint64_t i = 0; i < e; i++) fds.back().push_back(Socket(port));
            for (uint64_t i = e > 0; i <= e; i++) Add(made.back(), fds.back()[i]);
        } else if (what == "post" || what == "done") { /* connection, socket (0: control), bytes */
            std::cin >> b >> c;
            (what == "post" ? Posted : Done)(made[a], fds[a][b], c);
        } else if (what == "close") {
            Closed(made[a]);
            made[a] = NULL;
        } else if (what == "iteration") {
            flowslot_iteration(a);
        } else if (what == "poll") { /* ms that it may take until a daemon has answered */
            for (; a > 0 && All()->job.link != FLOWSLOT_REGISTERED; a--) {
                usleep(1000);
                Posted(made[0], fds[0][0], 0);
            }
        } else if (what == "registered") {
            std::cout << (All()->job.link == FLOWSLOT_REGISTERED) << std::endl;
            continue;
        } else if (what == "communicators") {
            int n = 0;
            for (struct flowslot_nccl_comm *comm = All()->comms; comm != NULL; comm = comm->next) n++;
            std::cout << n << std::endl;
            continue;
        } else {
            return 1;
        }
        std::cout << All()->iteration << std::endl;
    }
    return 0;
}
