/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the patch makes of a job's messages, without a job: `flow name ADDRESS...` connects to each of
 * these at the scheduler's port, and prints the job's name as flowslot_open() has it; `flow`
 * reads messages of one connection and prints its iteration after each: "pushed KEY" (the other end
 * has), "ready KEY BYTES" (this end sends), or "restart 0" (an end begins anew).
 */
#include "flowslot_pslite.h"

#include <iostream>

inline void ps::FreeData(void *, void *) {} /* ps-lite's is not included */

static int Name(int argc, char **argv) {
    struct flowslot job;
    for (int i = 2; i < argc; i++) {
        struct sockaddr_in to = {};
        to.sin_family = AF_INET;
        to.sin_port = htons((uint16_t)atoi(getenv("DMLC_PS_ROOT_PORT")));
        inet_pton(AF_INET, argv[i], &to.sin_addr);
        if (connect(socket(AF_INET, SOCK_STREAM, 0), (struct sockaddr *)&to, sizeof(to))) return 1;
    }
    flowslot_open(&job, "/nonexistent", flowslot_ps::JobName().c_str(), 0, 1);
    std::cout << job.job << "\n";
    return 0;
}

int main(int argc, char **argv) {
    flowslot_ps::Flow flow;
    std::string what;
    uint64_t key, bytes;
    if (argc > 1) return Name(argc, argv);
    while (std::cin >> what >> key) {
        if (what == "pushed") {
            flow.Pushed(key);
        } else if (what == "restart") {
            flow.Restart();
        } else {
            std::cin >> bytes;
            flow.Ready(key, bytes);
        }
        flow.Print(0, 0);
    }
    return 0;
}
