/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flowslot_pslite.h - what ps-lite's ZeroMQ van tells flowslot; included by zmq_van.h, once in a
 * program.
 *
 * One flow per data connection, which is between a worker and a server; each end reports what it
 * sends there. Bytes are those of values: keys, lengths and ps-lite's own headers do not count.
 *
 *   ready   KVWorker::Send or KVServer::Response was called
 *   posted  ZeroMQ frees a message: the kernel has it, but for up to 8 kB that it gathers first
 *   done    the other end's kernel has acknowledged it (SIOCOUTQ; the same 8 kB count too early, and
 *           as much as there are pulls behind the last values that ZeroMQ still has)
 *
 * A worker's iteration begins when the keys come again (Keys). A server's has the number of the
 * worker's whose pushes it has: whatever else is pulled meanwhile belongs to it.
 *
 * Nothing here waits for a daemon, and nothing is allocated between a connection and the next. A flow's
 * mutex is held for some arithmetic, and for some system calls that do not wait: where an iteration
 * begins, and where a server receives a message. What has been acknowledged is looked at by ps-lite's
 * receive threads, which spin; or, where they sleep (calm.patch), by a thread of our own, which sleeps
 * while nothing is under way. It would take the processor from those that spin while they hold the
 * lock that all need. Who spins and has looked lets others run, while a daemon listens: what our work
 * and the daemon's take is given back.
 *
 * $FLOWSLOT_JOB names the job (default: pslite-, the scheduler's address and its port), $FLOWSLOT_SOCKET the
 * daemon's socket; with $FLOWSLOT_TOTALS=1 each flow's totals are printed at the end.
 */
#ifndef FLOWSLOT_PSLITE_H
#define FLOWSLOT_PSLITE_H

#include "flowslot_pslite_flow.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <zmq.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ps/internal/env.h"
#include "ps/sarray.h"

#if __cplusplus < 201402L
#error "flowslot needs C++14, with which ps-lite's Makefile compiles; its CMakeLists.txt says C++11"
#endif
#if ZMQ_VERSION < ZMQ_MAKE_VERSION(4, 2, 0)
#error "flowslot needs ZeroMQ 4.2 or later: before, it does not tell which socket a message came by"
#endif

namespace ps {
inline void FreeData(void *data, void *hint);
}

namespace flowslot_ps {

constexpr int kNodes = 512;      /* ids of nodes below this are reported */
constexpr int kSockets = kNodes; /* of ZeroMQ that we need: two for each of the servers, half the ids */
#ifdef PS_ZMQ_CALM
constexpr bool kCalm = true;
#else
constexpr bool kCalm = false;
#endif
constexpr int kBusyMs = 2, kIdleMs = 100; /* between looks, while something is under way and not */
constexpr uint64_t kSpinNs = 1000000; /* between looks of those that spin */
constexpr uint64_t kPollNs = 10000000;
constexpr int kDescriptors = 4096; /* the lowest ones are looked at */

/* An address as text: one spelling for each. */
inline std::string Text(int family, const void *ip) {
    char text[INET6_ADDRSTRLEN] = "";
    return inet_ntop(family, ip, text, sizeof(text)) ? text : "";
}

/* Where the scheduler is: `uri`, if that is an address; else the one that this process's connections
 * to its port lead to; else `uri` as it is spelled. A host's name may be spelled in several ways, and
 * be that of several hosts; an address may not. */
inline std::string Scheduler(const std::string &uri, int root) {
    struct in6_addr ip;
    std::string only;
    if (inet_pton(AF_INET, uri.c_str(), &ip) == 1) return Text(AF_INET, &ip);
    if (inet_pton(AF_INET6, uri.c_str(), &ip) == 1)
        return IN6_IS_ADDR_V4MAPPED(&ip) ? Text(AF_INET, &ip.s6_addr[12]) : Text(AF_INET6, &ip);
    for (int fd = 0; fd < kDescriptors; fd++) {
        struct sockaddr_storage there;
        socklen_t size = sizeof(there);
        uint16_t port = 0;
        if (getpeername(fd, (struct sockaddr *)&there, &size) != 0) continue;
        uint8_t family = flowslot__address(&there, ip.s6_addr, &port);
        if (family == 0 || port != root) continue;
        std::string text = Text(family, &ip);
        if (!only.empty() && text != only) return uri;
        only = text;
    }
    return only.empty() ? uri : only;
}

/* Call it when this process is connected to the scheduler. */
inline std::string JobName() {
    ps::Environment *settings = ps::Environment::Get();
    const char *name = getenv("FLOWSLOT_JOB"), *uri = settings->find("DMLC_PS_ROOT_URI"),
               *port = settings->find("DMLC_PS_ROOT_PORT");
    if (name != NULL && *name != '\0') return name;
    int number = port ? atoi(port) : 0;
    return "pslite-" + Scheduler(uri ? uri : "", number) + "-" + std::to_string(number);
}

/* All flows of this process. */
class Reporter {
  public:
    /* It is never destroyed: ZeroMQ's threads may outlive whatever exit() runs. */
    static Reporter &Get() {
        static Reporter *reporter = new Reporter;
        return *reporter;
    }

    /* Of this process: call it before the connection to `peer` is made. */
    void Prepare(int node, int peer) {
        std::lock_guard<std::mutex> lock(mu_);
        if (peer < 0 || peer >= kNodes || hopeless_) return;
        if (node_ < 0) {
            hopeless_ = !StartThread();
            if (hopeless_) return;
            flowslot_open(&job_, NULL, JobName().c_str(), node, kNodes);
            node_ = node;
            for (int known : peers_) To(known)->Restart(); /* after what came late in the last life */
        }
        if (flows_[peer].load() == NULL) {
            flows_[peer].store(new Flow);
            peers_.push_back(peer);
        }
    }

    Flow *To(int peer) {
        return peer < 0 || peer >= kNodes ? NULL : flows_[peer].load(std::memory_order_acquire);
    }

    /* A worker: this socket is about to connect to a server. */
    void Connecting(void *context, void *socket, int node, int peer, int port) {
        char endpoint[64];
        void *events;
        int linger = 0;
        Prepare(node, peer);
        std::lock_guard<std::mutex> lock(mu_);
        for (auto &watch : watches_)
            if (watch.peer == peer) watch.socket = NULL; /* ps-lite has closed it */
        snprintf(endpoint, sizeof(endpoint), "inproc://flowslot-%d-%zu", peer, watches_.size());
        if (To(peer) == NULL || zmq_socket_monitor(socket, endpoint, ZMQ_EVENT_CONNECTED) != 0) return;
        events = zmq_socket(context, ZMQ_PAIR);
        if (events != NULL) zmq_setsockopt(events, ZMQ_LINGER, &linger, sizeof(linger));
        if (events != NULL && zmq_connect(events, endpoint) == 0) {
            watches_.push_back(Watch{peer, port, socket, events});
            return;
        }
        zmq_socket_monitor(socket, NULL, 0); /* ZeroMQ would wait for somebody to listen */
        if (events != NULL) zmq_close(events);
    }

    /* A server, which listens at this port: a worker's message came through this socket. */
    void Came(int node, int peer, int fd, int port) {
        Flow *flow = To(peer);
        if (fd < 0) return;
        if (flow == NULL || node_ < 0) { /* the first message, also after Stop() and another start */
            Prepare(node, peer);
            flow = To(peer);
        }
        if (flow != NULL) flow->Open(&job_, fd, peer, FLOWSLOT_PULL, port);
    }

    /* A server: a new process takes a dead worker's place, and counts its iterations from zero. */
    void Recovered(int peer) {
        Flow *flow = To(peer);
        if (flow != NULL) flow->Restart();
    }

    /* Receive threads that spin call it all the time. */
    void Tick() {
        if (kCalm) return;
        uint64_t now = flowslot__now(CLOCK_MONOTONIC), next = next_.load(std::memory_order_relaxed);
        if (now < next || !next_.compare_exchange_strong(next, now + kSpinNs)) return;
        std::unique_lock<std::mutex> lock(mu_, std::try_to_lock);
        if (!lock.owns_lock()) return;
        LookLocked(now);
        if (!heard_) return;
        lock.unlock();
        sched_yield();
    }

    /* There is something to send. */
    void Wake() {
        uint64_t once = 1;
        if (!kCalm || !idle_.load() || !idle_.exchange(false)) return;
        (void)!write(wake_, &once, sizeof(once));
    }

    /* Before ZeroMQ's context is destroyed. The last acknowledgements may be up to 40 ms late: the
     * other end's kernel delays them. */
    void Stop() {
        const char *totals = getenv("FLOWSLOT_TOTALS");
        EndThread();
        std::lock_guard<std::mutex> lock(mu_);
        for (int k = 0; k < 100; k++) {
            bool done = true;
            for (auto &watch : watches_) Events(watch); /* a short job's last were not seen yet */
            for (int peer : peers_) done = To(peer)->IsDone(false) && done;
            if (done) break;
            usleep(1000);
        }
        for (auto &watch : watches_) {
            if (watch.socket != NULL) zmq_socket_monitor(watch.socket, NULL, 0); /* as above */
            zmq_close(watch.events);
        }
        watches_.clear();
        for (int peer : peers_) {
            To(peer)->Close();
            if (totals != NULL && *totals == '1') To(peer)->Print(node_, peer);
        }
        if (node_ >= 0) flowslot_close(&job_);
        node_ = -1;
        heard_ = false;
    }

  private:
    /* Whether it could be had. */
    bool StartThread() {
        sigset_t all, before;
        if (!kCalm) return true;
        if (wake_ < 0) wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (wake_ < 0) return false;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the application's */
        end_ = false;
        running_ = pthread_create(&thread_, NULL, Run, this) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return running_;
    }

    void EndThread() {
        uint64_t once = 1;
        if (!running_) return;
        end_ = true;
        (void)!write(wake_, &once, sizeof(once));
        pthread_join(thread_, NULL);
        running_ = false;
    }

    static void *Run(void *self) {
        Reporter *me = static_cast<Reporter *>(self);
        uint64_t times;
        struct pollfd wake = {me->wake_, POLLIN, 0};
        while (!me->end_) {
            bool busy = me->Look();
            if (!busy) {
                me->idle_ = true;
                busy = me->Look(); /* of what came before that, Wake() has told nobody */
            }
            if (busy) me->idle_ = false;
            poll(&wake, 1, busy ? kBusyMs : kIdleMs);
            me->idle_ = false;
            if (wake.revents) (void)!read(me->wake_, &times, sizeof(times));
        }
        return NULL;
    }

    bool Look() {
        std::lock_guard<std::mutex> lock(mu_);
        return LookLocked(flowslot__now(CLOCK_MONOTONIC));
    }

    /* Whether something is under way. */
    bool LookLocked(uint64_t now) {
        bool busy = false, poll = node_ >= 0 && now >= poll_;
        for (auto &watch : watches_) Events(watch);
        /* Also flows that are done: whose other end has died ends. */
        for (int peer : peers_) busy = !To(peer)->IsDone(poll) || busy;
        if (poll) {
            poll_ = now + kPollNs;
            heard_ = flowslot_poll(&job_);
        }
        return busy;
    }

    /* Of connections to a server's port. */
    struct Watch {
        int peer, port;
        void *socket, *events;
    };

    void Events(const Watch &watch) {
        zmq_msg_t message;
        zmq_msg_init(&message);
        while (zmq_msg_recv(&message, watch.events, ZMQ_DONTWAIT) >= 0) {
            const char *event = (const char *)zmq_msg_data(&message);
            int32_t fd = -1;
            /* The first of two parts: uint16 event, uint32 value. */
            if (zmq_msg_more(&message) && zmq_msg_size(&message) >= 6) {
                memcpy(&fd, event + 2, sizeof(fd));
                To(watch.peer)->Open(&job_, fd, watch.peer, FLOWSLOT_PUSH, watch.port);
            }
        }
        zmq_msg_close(&message);
    }

    std::mutex mu_;
    struct flowslot job_ = {};
    std::atomic<int> node_{-1};
    std::array<std::atomic<Flow *>, kNodes> flows_ = {};
    std::vector<int> peers_;
    std::vector<Watch> watches_;
    uint64_t poll_ = 0;
    bool heard_ = false; /* a daemon has answered */
    std::atomic<uint64_t> next_{0};
    pthread_t thread_;
    bool running_ = false, hopeless_ = false; /* without the thread nothing is reported */
    int wake_ = -1;
    std::atomic<bool> end_{false}, idle_{false};
};

/* Called by ZeroMQ instead of ps::FreeData, once the kernel has all of a value. */
template <int peer>
void Freed(void *data, void *hint) {
    Flow *flow = Reporter::Get().To(peer);
    if (flow != NULL) flow->Posted(static_cast<ps::SArray<char> *>(hint)->size());
    ps::FreeData(data, hint);
}

template <int... peers>
zmq_free_fn *FreedTo(int peer, std::integer_sequence<int, peers...>) {
    static zmq_free_fn *const all[] = {Freed<peers>...};
    return all[peer];
}

/* A part of a message on the wire. */
inline uint64_t Frame(uint64_t bytes) {
    return bytes + (bytes < 256 ? 2 : 9); /* ZMTP */
}

/* Part `part` (keys, values, lengths) of a message is about to be given to ZeroMQ, after ps-lite's
 * own part, of `meta` bytes. */
inline zmq_free_fn *FreeTo(int peer, size_t part, const std::vector<ps::SArray<char>> &parts, int meta) {
    Flow *flow = part == 1 ? Reporter::Get().To(peer) : NULL;
    uint64_t after = 0;
    if (flow == NULL) return ps::FreeData;
    for (size_t k = 2; k < parts.size(); k++) after += Frame(parts[k].size());
    if (parts[1].size() == 0) after += Frame((uint64_t)meta) + Frame(parts[0].size()) + Frame(0);
    flow->Sent(parts[1].size(), after);
    return FreedTo(peer, std::make_integer_sequence<int, kNodes>());
}

void Ready(int peer, uint64_t key, uint64_t bytes) {
    Flow *flow = Reporter::Get().To(peer);
    if (flow == NULL) return;
    flow->Ready(key, bytes);
    Reporter::Get().Wake();
}

void Pushed(int peer, uint64_t key) {
    Flow *flow = Reporter::Get().To(peer);
    if (flow != NULL) flow->Pushed(key);
}

}  // namespace flowslot_ps

#endif
