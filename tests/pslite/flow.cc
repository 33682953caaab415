/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the patch makes of a job's messages, without a job: `flow name` prints the job's name, `flow`
 * reads messages of one connection and prints its iteration after each: "pushed KEY" (the other end
 * has), "ready KEY BYTES" (this end sends), or "restart 0" (an end begins anew).
 */
#include "flowslot_pslite.h"

#include <iostream>

inline void ps::FreeData(void *, void *) {} /* ps-lite's is not included */

int main(int argc, char **) {
    flowslot_ps::Flow flow;
    std::string what;
    uint64_t key, bytes;
    if (argc > 1) {
        std::cout << flowslot_ps::JobName() << "\n";
        return 0;
    }
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
