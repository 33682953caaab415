/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flowslot_pslite_flow.h - what one end of a connection between a worker and a server of ps-lite has
 * sent, and in which iteration; see flowslot_pslite.h.
 */
#ifndef FLOWSLOT_PSLITE_FLOW_H
#define FLOWSLOT_PSLITE_FLOW_H

#include "flowslot_shm.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace flowslot_ps {

constexpr uint32_t kKeys = 16384; /* places for a flow's keys, of which half are used */

/* Where iterations begin, told by the keys that are pushed one after another: both ends see the same
 * order of them. */
class Keys {
  public:
    /* Pages are touched as they are needed. */
    Keys() : places_(static_cast<Place *>(calloc(kKeys, sizeof(Place))), free) {}

    /* Whether the next iteration begins with this key, which the present one has had. A key that is
     * new, or was away, is one behind the others: frameworks push a tensor's for the first time, and
     * again, before the next tensor's, and no iteration begins between them (but with the very first
     * one). Nor does one with keys that are too many. */
    bool Add(uint64_t key) {
        Place *place = Find(key);
        if (place == NULL) return false;
        bool begins = place->iteration == iteration_;
        iteration_ += begins;
        place->iteration = std::max(place->iteration + 1, iteration_ - 1);
        return begins;
    }

  private:
    struct Place {
        uint64_t key;
        uint32_t iteration; /* in which it came last, or the one before; 0: free */
    };

    /* Its place; NULL: there is none left. */
    Place *Find(uint64_t key) {
        if (places_ == nullptr) return NULL;
        uint32_t at = (uint32_t)(key * UINT64_C(0x9E3779B97F4A7C15) >> 48) % kKeys;
        while (places_[at].iteration != 0) {
            if (places_[at].key == key) return &places_[at];
            at = (at + 1) % kKeys;
        }
        if (taken_ == kKeys / 2) return NULL;
        taken_++;
        places_[at].key = key;
        return &places_[at];
    }

    std::unique_ptr<Place[], decltype(&free)> places_;
    uint32_t taken_ = 0;
    uint32_t iteration_ = 1;
};

/* What one end of a data connection sends. */
class Flow {
  public:
    /* From now on it goes through this socket; a server's has this port. */
    void Open(struct flowslot *job, int fd, int peer, enum flowslot_role role, int port) {
        std::lock_guard<std::mutex> lock(mu_);
        uint64_t cookie = Cookie(fd); /* its number may have been another socket's */
        if (cookie == 0 || (open_ && cookie == cookie_)) return;
        if (Port(fd, role == FLOWSLOT_PUSH ? getpeername : getsockname) != port) return; /* or is now */
        fd_ = fd;
        cookie_ = cookie;
        done_ = posted_; /* whatever a connection before had is lost with it */
        job_ = job;
        peer_ = peer;
        role_ = role;
        Reopen();
        Begin();
    }

    void Close() {
        std::lock_guard<std::mutex> lock(mu_);
        CloseLocked();
    }

    /* The other end, or this one, begins anew, and so do iterations, by another connection. Bytes are
     * counted on: some may come late. */
    void Restart() {
        std::lock_guard<std::mutex> lock(mu_);
        CloseLocked();
        keys_ = Keys();
        pushed_ = Keys();
        iteration_ = pushes_ = bytes_ = before_ = expected_ = 0;
        answers_ = false;
    }

    void Ready(uint64_t key, uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mu_);
        bool begins = keys_.Add(key);
        if (answers_ ? pushes_ != iteration_ : begins) Next(); /* it may pull before it pushes */
        ready_ += bytes;
        bytes_ += bytes;
        if (open_) flowslot_ready(&flow_, bytes);
    }

    /* The other end has pushed a key to us. */
    void Pushed(uint64_t key) {
        std::lock_guard<std::mutex> lock(mu_);
        answers_ = true;
        pushes_ += pushed_.Add(key);
    }

    /* Values go to ZeroMQ, and then so many other bytes; or those alone, as with a pull. */
    void Sent(uint64_t bytes, uint64_t after) {
        std::lock_guard<std::mutex> lock(mu_);
        sent_ += bytes;
        after_ = bytes != 0 ? after : after_ + after;
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

    /* Look at what has been acknowledged, and at the connection, if there is something or if it is to
     * be looked at all the same. Whether there is nothing more to wait for. */
    bool IsDone(bool look) {
        std::unique_lock<std::mutex> lock(mu_);
        if (!open_) return posted_ == ready_; /* nobody tells what is done */
        if (done_ == posted_ && !look) return done_ == ready_;
        uint64_t cookie = cookie_, posted = posted_, after = sent_ == posted_ ? after_ : 0, queued = 0;
        int fd = fd_;
        lock.unlock(); /* who sends does not wait for system calls, or until this thread goes on */
        bool there = Queued(fd, cookie, &queued);
        lock.lock();
        if (cookie == cookie_) Take(there, posted, queued, after);
        return done_ == ready_;
    }

    void Print(int node, int peer) {
        std::lock_guard<std::mutex> lock(mu_);
        fprintf(stderr, "flowslot: node %d to %d: iteration %llu, ready %llu, posted %llu, done %llu\n",
                node, peer, (unsigned long long)iteration_, (unsigned long long)ready_,
                (unsigned long long)posted_, (unsigned long long)done_);
    }

  private:
    void Next() {
        uint64_t queued = 0;
        bool there = open_ && Queued(fd_, cookie_, &queued);
        Take(there, posted_, queued, sent_ == posted_ ? after_ : 0);
        uint64_t next = answers_ ? pushes_ : iteration_ + 1;
        if (next < iteration_ && open_) Reopen(); /* in a record iterations do not fall */
        iteration_ = next;
        expected_ = bytes_ == before_ ? bytes_ : 0; /* what the last two had, if it was the same */
        before_ = bytes_;
        bytes_ = 0;
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

    /* What the kernel has of it and the other end's has not acknowledged. False: it is closed. */
    static bool Queued(int fd, uint64_t cookie, uint64_t *queued) {
        int queue = 0;
        if (ioctl(fd, SIOCOUTQ, &queue) != 0 || Cookie(fd) != cookie) return false;
        *queued = queue < 0 ? UINT64_MAX : (uint64_t)queue;
        return true;
    }

    /* After so much was posted, so much was queued. The queue also holds headers, and messages that
     * are not posted as a whole yet: less counts as done than is. But what follows the last values,
     * `after`, must not: an acknowledgement that the other end delays would hold a flow. */
    void Take(bool there, uint64_t posted, uint64_t queued, uint64_t after) {
        if (!open_) return;
        if (!there) {
            done_ = posted_;
            CloseLocked();
            return;
        }
        queued -= std::min(queued, after);
        if (posted < queued || posted - queued <= done_) return;
        flowslot_done(&flow_, posted - queued - done_);
        done_ = posted - queued;
    }

    void Reopen() {
        CloseLocked();
        open_ = flowslot_flow_open(job_, &flow_, fd_, peer_, 0, role_) == 0;
    }

    void CloseLocked() {
        if (open_) flowslot_flow_close(&flow_);
        open_ = false;
    }

    /* Of a TCP connection; of others -1. */
    static int Port(int fd, int (*end)(int, struct sockaddr *, socklen_t *)) {
        struct sockaddr_in6 at = {};
        socklen_t size = sizeof(at);
        if (end(fd, (struct sockaddr *)&at, &size) != 0) return -1;
        if (at.sin6_family != AF_INET && at.sin6_family != AF_INET6) return -1;
        return ntohs(at.sin6_port); /* where IPv4 has it, too */
    }

    static uint64_t Cookie(int fd) {
        uint64_t cookie = 0;
        socklen_t size = sizeof(cookie);
        return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
    }

    std::mutex mu_;
    struct flowslot_flow flow_ = {};
    struct flowslot *job_ = NULL;
    enum flowslot_role role_ = FLOWSLOT_PUSH;
    bool open_ = false;
    int fd_ = -1, peer_ = -1;
    uint64_t cookie_ = 0;
    uint64_t iteration_ = 0;
    uint64_t ready_ = 0, sent_ = 0, posted_ = 0, done_ = 0; /* in all iterations */
    uint64_t after_ = 0;
    uint64_t bytes_ = 0, before_ = 0, expected_ = 0; /* ready in this one, in the last; 0: unknown */
    bool answers_ = false; /* the other end has pushed */
    uint64_t pushes_ = 0;  /* iterations that it has pushed before its present one */
    Keys keys_, pushed_;
};

}  // namespace flowslot_ps

#endif
