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
 *   done    the other end's kernel has acknowledged it (SIOCOUTQ)
 *
 * An iteration begins when a key comes that the present one has had, or with flowslot_ps::Iteration().
 * A server's has the number of the worker's that it answers: it counts what that one pushes.
 *
 * Nothing here waits for a daemon, and nothing is allocated once a connection was made. A flow's
 * mutex is held for some arithmetic, and, where an iteration or a connection begins, for some system
 * calls that do not wait.
 *
 * $FLOWSLOT_JOB names the job (default: pslite- and the scheduler's address), $FLOWSLOT_SOCKET the
 * daemon's socket; with $FLOWSLOT_TOTALS=1 each flow's totals are printed at the end.
 */
#ifndef FLOWSLOT_PSLITE_H
#define FLOWSLOT_PSLITE_H

#include "flowslot_shm.h"

#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ps/internal/env.h"
#include "ps/sarray.h"

#if ZMQ_VERSION < ZMQ_MAKE_VERSION(4, 2, 0)
#error "flowslot needs ZeroMQ 4.2 or later: before, it does not tell which socket a message came by"
#endif

namespace ps {
inline void FreeData(void *data, void *hint);
}

namespace flowslot_ps {

constexpr int kNodes = 512;      /* ids of nodes below this are reported */
constexpr uint32_t kKeys = 4096; /* places for an iteration's keys, of which half are used */
constexpr uint64_t kTickNs = 1000000; /* or what CLOCK_MONOTONIC_COARSE can tell apart: up to 4 ms */
constexpr uint64_t kPollNs = 10000000;
constexpr uint64_t kHeader = 512; /* bytes, at least as much as ps-lite's own part of a message */

/* The keys that an iteration has had. */
class Keys {
  public:
    Keys() : places_(new Place[kKeys]()) {}

    /* Whether it is new. Of more than kKeys / 2 keys those that are too many always are. */
    bool Add(uint64_t key) {
        uint32_t at = (uint32_t)(key * UINT64_C(0x9E3779B97F4A7C15) >> 32) % kKeys;
        while (places_[at].iteration == iteration_) {
            if (places_[at].key == key) return false;
            at = (at + 1) % kKeys;
        }
        if (count_ < kKeys / 2) {
            places_[at] = Place{key, iteration_};
            count_++;
        }
        return true;
    }

    void Clear() {
        iteration_++; /* all places are free */
        count_ = 0;
    }

  private:
    struct Place {
        uint64_t key, iteration;
    };
    std::unique_ptr<Place[]> places_;
    uint64_t iteration_ = 1;
    uint32_t count_ = 0;
};

/* What one end of a data connection sends. */
class Flow {
  public:
    /* From now on it goes through this socket. */
    void Open(struct flowslot *job, int fd, int peer, enum flowslot_role role) {
        std::lock_guard<std::mutex> lock(mu_);
        uint64_t cookie = Cookie(fd); /* its number may have been another socket's */
        if (cookie == 0 || (open_ && cookie == cookie_)) return;
        CloseLocked();
        fd_ = fd;
        cookie_ = cookie;
        done_ = posted_; /* whatever a connection before had is lost with it */
        open_ = flowslot_flow_open(job, &flow_, fd, peer, 0, role) == 0;
        Begin();
    }

    void Close() {
        std::lock_guard<std::mutex> lock(mu_);
        CloseLocked();
    }

    void Ready(uint64_t key, uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mu_);
        if (!keys_.Add(key)) {
            Next();
            keys_.Add(key);
        } else if (ready_ == 0 && pushes_ > iteration_) { /* it pushed before it pulled */
            iteration_ = pushes_;
            Begin();
        }
        ready_ += bytes;
        bytes_ += bytes;
        if (open_) flowslot_ready(&flow_, bytes);
    }

    /* The other end has pushed a key to us, and begins an iteration if that one comes again. */
    void Pushed(uint64_t key) {
        std::lock_guard<std::mutex> lock(mu_);
        if (pushed_.Add(key)) return;
        pushes_++;
        pushed_.Clear();
        pushed_.Add(key);
    }

    /* Values go to ZeroMQ; so many bytes follow them in their message. */
    void Sent(uint64_t bytes, uint64_t after) {
        std::lock_guard<std::mutex> lock(mu_);
        sent_ += bytes;
        after_ = bytes != 0 ? after : after_ + kHeader + after; /* a pull, or the answer to a push */
        if (sent_ > ready_) { /* sent again (PS_RESEND), or by a way that we do not know */
            uint64_t more = sent_ - ready_;
            ready_ += more;
            bytes_ += more;
            if (open_) flowslot_ready(&flow_, more);
        }
    }

    void Posted(uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mu_);
        posted_ += bytes;
        if (open_) flowslot_posted(&flow_, bytes);
    }

    void Tick() {
        std::unique_lock<std::mutex> lock(mu_, std::try_to_lock);
        if (lock.owns_lock()) Look();
    }

    /* Whether all that was posted is done. */
    bool IsDone() {
        std::lock_guard<std::mutex> lock(mu_);
        Look();
        return !open_ || (done_ == posted_ && posted_ == sent_);
    }

    void Iteration() {
        std::lock_guard<std::mutex> lock(mu_);
        if (bytes_ != 0) Next();
    }

    void Print(int node, int peer) {
        std::lock_guard<std::mutex> lock(mu_);
        fprintf(stderr, "flowslot: node %d to %d: iteration %llu, ready %llu, posted %llu, done %llu\n",
                node, peer, (unsigned long long)iteration_, (unsigned long long)ready_,
                (unsigned long long)posted_, (unsigned long long)done_);
    }

  private:
    void Next() {
        Look();
        iteration_ = std::max(iteration_ + 1, pushes_);
        expected_ = bytes_ == before_ ? bytes_ : 0; /* what the last two had, if it was the same */
        before_ = bytes_;
        bytes_ = 0;
        keys_.Clear();
        Begin();
    }

    void Begin() {
        uint64_t left = ready_ - done_, total = expected_;
        if (!open_) return;
        /* What is left to be sent: of the iteration before, or of this one by a new connection. */
        if (total != 0) total += left - (bytes_ < expected_ ? bytes_ : expected_);
        flowslot_begin(&flow_, iteration_, total);
        if (left != 0) flowslot_progress_add(&flow_, left, posted_ - done_, 0);
    }

    /* How much of what was posted does the kernel still have? Its queue also holds headers, and
     * messages that are not posted as a whole yet: less counts as done than is. But what follows
     * the last values must not: an acknowledgement that the other end delays would hold a flow. */
    void Look() {
        int queue = 0;
        uint64_t queued, done;
        if (!open_ || done_ == posted_) return;
        if (ioctl(fd_, SIOCOUTQ, &queue) != 0 || Cookie(fd_) != cookie_) { /* it is closed */
            done_ = posted_;
            CloseLocked();
            return;
        }
        if (queue < 0) return;
        queued = (uint64_t)queue;
        if (sent_ == posted_) queued -= queued < after_ ? queued : after_;
        if (queued >= posted_ - done_) return;
        done = posted_ - queued - done_;
        done_ += done;
        flowslot_done(&flow_, done);
    }

    void CloseLocked() {
        if (open_) flowslot_flow_close(&flow_);
        open_ = false;
    }

    static uint64_t Cookie(int fd) {
        uint64_t cookie = 0;
        socklen_t size = sizeof(cookie);
        return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
    }

    std::mutex mu_;
    struct flowslot_flow flow_ = {};
    bool open_ = false;
    int fd_ = -1;
    uint64_t cookie_ = 0;
    uint64_t iteration_ = 0;
    uint64_t ready_ = 0, sent_ = 0, posted_ = 0, done_ = 0; /* in all iterations */
    uint64_t after_ = 0;
    uint64_t bytes_ = 0, before_ = 0, expected_ = 0; /* ready in this one, in the last; 0: unknown */
    uint64_t pushes_ = 0; /* iterations that the other end has pushed before its present one */
    Keys keys_, pushed_;
};

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
        if (peer < 0 || peer >= kNodes) return;
        if (node_ < 0) {
            ps::Environment *settings = ps::Environment::Get();
            const char *name = getenv("FLOWSLOT_JOB"), *uri = settings->find("DMLC_PS_ROOT_URI"),
                       *port = settings->find("DMLC_PS_ROOT_PORT");
            std::string job = name != NULL && *name != '\0'
                                  ? name
                                  : std::string("pslite-") + (uri ? uri : "") + "-" + (port ? port : "");
            flowslot_open(&job_, NULL, job.c_str(), node, kNodes);
            node_ = node;
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
    void Connecting(void *context, void *socket, int node, int peer) {
        char endpoint[64];
        void *events;
        int linger = 0;
        Prepare(node, peer);
        std::lock_guard<std::mutex> lock(mu_);
        snprintf(endpoint, sizeof(endpoint), "inproc://flowslot-%d-%zu", peer, watches_.size());
        if (To(peer) == NULL || zmq_socket_monitor(socket, endpoint, ZMQ_EVENT_CONNECTED) != 0) return;
        events = zmq_socket(context, ZMQ_PAIR);
        if (events != NULL) zmq_setsockopt(events, ZMQ_LINGER, &linger, sizeof(linger));
        if (events != NULL && zmq_connect(events, endpoint) == 0) {
            watches_.emplace_back(peer, events);
            return;
        }
        zmq_socket_monitor(socket, NULL, 0); /* ZeroMQ would wait for somebody to listen */
        if (events != NULL) zmq_close(events);
    }

    /* A server: a worker's message came through this socket. */
    void Came(int node, int peer, int fd) {
        Flow *flow = To(peer);
        if (fd < 0) return;
        if (flow == NULL || node_ < 0) { /* the first message, also after Stop() and another start */
            Prepare(node, peer);
            flow = To(peer);
        }
        if (flow != NULL) flow->Open(&job_, fd, peer, FLOWSLOT_PULL);
    }

    /* Call it often: it does something once in a millisecond. */
    void Tick() {
        uint64_t now = flowslot__now(CLOCK_MONOTONIC_COARSE), next = next_.load(std::memory_order_relaxed);
        if (now < next || !next_.compare_exchange_strong(next, now + kTickNs)) return;
        std::unique_lock<std::mutex> lock(mu_, std::try_to_lock);
        if (!lock.owns_lock()) return;
        for (auto &watch : watches_) Events(watch.first, watch.second);
        for (int peer : peers_) To(peer)->Tick();
        if (node_ < 0 || now < poll_) return;
        poll_ = now + kPollNs;
        flowslot_poll(&job_); /* has the daemon answered? */
    }

    void Iteration() {
        std::lock_guard<std::mutex> lock(mu_);
        for (int peer : peers_) To(peer)->Iteration();
    }

    /* Before ZeroMQ's context is destroyed. The last acknowledgements may be up to 40 ms late: the
     * other end's kernel delays them. */
    void Stop() {
        const char *totals = getenv("FLOWSLOT_TOTALS");
        std::lock_guard<std::mutex> lock(mu_);
        for (int k = 0; k < 100; k++) {
            bool done = true;
            for (int peer : peers_) done = To(peer)->IsDone() && done;
            if (done) break;
            usleep(1000);
        }
        for (auto &watch : watches_) zmq_close(watch.second); /* somebody must listen until the end */
        watches_.clear();
        for (int peer : peers_) {
            To(peer)->Close();
            if (totals != NULL && *totals == '1') To(peer)->Print(node_, peer);
        }
        if (node_ >= 0) flowslot_close(&job_);
        node_ = -1;
    }

  private:
    void Events(int peer, void *events) {
        zmq_msg_t message;
        zmq_msg_init(&message);
        while (zmq_msg_recv(&message, events, ZMQ_DONTWAIT) >= 0) {
            const char *event = (const char *)zmq_msg_data(&message);
            int32_t fd = -1;
            /* The first of two parts: uint16 event, uint32 value. */
            if (zmq_msg_more(&message) && zmq_msg_size(&message) >= 6) {
                memcpy(&fd, event + 2, sizeof(fd));
                To(peer)->Open(&job_, fd, peer, FLOWSLOT_PUSH);
            }
        }
        zmq_msg_close(&message);
    }

    std::mutex mu_;
    struct flowslot job_ = {};
    std::atomic<int> node_{-1};
    std::array<std::atomic<Flow *>, kNodes> flows_ = {};
    std::vector<int> peers_;
    std::vector<std::pair<int, void *>> watches_;
    std::atomic<uint64_t> next_{0};
    uint64_t poll_ = 0;
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

/* Part `part` (keys, values, lengths) of a message is about to be given to ZeroMQ. */
inline zmq_free_fn *FreeTo(int peer, size_t part, const std::vector<ps::SArray<char>> &parts) {
    Flow *flow = part == 1 ? Reporter::Get().To(peer) : NULL;
    uint64_t after = 0;
    if (flow == NULL) return ps::FreeData;
    for (size_t k = 2; k < parts.size(); k++)
        after += parts[k].size() + (parts[k].size() < 256 ? 2 : 9); /* ZMTP's framing */
    flow->Sent(parts[1].size(), after);
    return FreedTo(peer, std::make_integer_sequence<int, kNodes>());
}

void Ready(int peer, uint64_t key, uint64_t bytes) {
    Flow *flow = Reporter::Get().To(peer);
    if (flow != NULL) flow->Ready(key, bytes);
}

void Pushed(int peer, uint64_t key) {
    Flow *flow = Reporter::Get().To(peer);
    if (flow != NULL) flow->Pushed(key);
}

void Iteration() { Reporter::Get().Iteration(); }

}  // namespace flowslot_ps

#endif
