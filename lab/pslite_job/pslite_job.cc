/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pslite_job.cc - a node of a ps-lite job, for flowslot_lab.pslite: a library, as BytePS has one.
 *
 * Data-parallel training with parameter servers that wait for everybody. In each iteration every
 * worker pushes and pulls all keys; a server answers a pull as soon as all workers have pushed that
 * key. Key k is at server k mod S. Values are numbers of 16 bits, and a server sends their sums, so
 * that both ends can check every byte; they do so outside.
 *
 * One node per process. All functions may be called from one thread only, and block.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "ps/ps.h"

namespace {

typedef uint16_t Word;

/* What has arrived, and when. */
class Trace {
  public:
    void Add(int64_t bytes) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        std::lock_guard<std::mutex> lock(mu_);
        total_ += bytes;
        points_.push_back({now.tv_sec * INT64_C(1000000000) + now.tv_nsec, total_});
    }

    /* At most `room` of those from `first` on; returns how many. */
    int64_t Get(int64_t first, int64_t room, int64_t *at_ns, int64_t *bytes) {
        std::lock_guard<std::mutex> lock(mu_);
        int64_t n = 0;
        for (size_t k = first; k < points_.size() && n < room; k++, n++) {
            at_ns[n] = points_[k].at_ns;
            bytes[n] = points_[k].bytes;
        }
        return n;
    }

  private:
    struct Point {
        int64_t at_ns, bytes;
    };
    std::mutex mu_;
    std::vector<Point> points_;
    int64_t total_ = 0;
};

Trace trace;

class Worker {
  public:
    /* `gradient`, `weights`: char[keys][bytes]. */
    Worker(int keys, size_t bytes, char *gradient, char *weights) : kv_(0, 0), bytes_(bytes) {
        const auto &ranges = ps::Postoffice::Get()->GetServerKeyRanges();
        for (int k = 0; k < keys; k++) {
            ps::Key key = ranges[k % ranges.size()].begin() + k;
            keys_.push_back(ps::SArray<ps::Key>(1, key));
            lens_.push_back(ps::SArray<int>(1, (int)bytes));
            pushed_.push_back(ps::SArray<char>(gradient + k * bytes, bytes));
            pulled_.push_back(ps::SArray<char>(weights + k * bytes, bytes));
        }
    }

    void Exchange() {
        std::vector<int> requests;
        for (size_t k = 0; k < keys_.size(); k++) {
            requests.push_back(kv_.ZPush(keys_[k], pushed_[k], lens_[k]));
            requests.push_back(kv_.ZPull(keys_[k], &pulled_[k], &lens_[k], 0,
                                         [this]() { trace.Add((int64_t)bytes_); }));
        }
        for (int request : requests) kv_.Wait(request);
    }

  private:
    ps::KVWorker<char> kv_;
    size_t bytes_;
    std::vector<ps::SArray<ps::Key>> keys_;
    std::vector<ps::SArray<int>> lens_;
    std::vector<ps::SArray<char>> pushed_, pulled_;
};

/*
 * Two generations of sums: a fast worker may push iteration i + 1 while sums of i are still on their
 * way to a slow one; it cannot push i + 2 before the slow one has pushed i + 1.
 */
class Server {
  public:
    /* `keys` of this server; `sums`: char[2][keys][bytes]. */
    Server(int keys, size_t bytes, char *sums)
        : servers_(ps::NumServers()), bytes_(bytes), sums_(sums), keys_(keys), kv_(0) {
        for (Key &key : keys_) {
            key.pushes.resize(ps::NumWorkers());
            key.pulls.resize(ps::NumWorkers());
        }
        kv_.set_request_handle([this](const ps::KVMeta &meta, const ps::KVPairs<char> &data,
                                      ps::KVServer<char> *) { Handle(meta, data); });
    }

    /* Blocks until all pulls of so many iterations were answered. */
    void Serve(int64_t iterations) {
        std::unique_lock<std::mutex> lock(mu_);
        changed_.wait(lock, [&] { return answered_ >= iterations * Pulls(); });
    }

    /* The sums of so many iterations were looked at: their place may be used again. */
    void Release(int64_t iterations) {
        std::lock_guard<std::mutex> lock(mu_);
        released_ = iterations;
        changed_.notify_all();
    }

  private:
    struct Pull {
        ps::KVMeta meta;
        ps::Key key; /* as ps-lite knows it */
    };
    struct Key {
        std::vector<int64_t> pushes, pulls; /* of each worker */
        int pushed[2] = {0, 0};             /* workers, by generation */
        int64_t complete = 0;               /* iterations */
        std::vector<Pull> waiting;          /* for the next one to be complete */
    };

    int64_t Pulls() const { return (int64_t)keys_.size() * ps::NumWorkers(); }

    char *Sum(size_t k, int64_t iteration) {
        return sums_ + ((iteration % 2) * keys_.size() + k) * bytes_;
    }

    void Handle(const ps::KVMeta &meta, const ps::KVPairs<char> &data) {
        const auto &range = ps::Postoffice::Get()->GetServerKeyRanges()[ps::MyRank()];
        size_t k = (data.keys[0] - range.begin()) / servers_;
        int worker = ps::Postoffice::IDtoRank(meta.sender);
        CHECK_LT(k, keys_.size());
        Key &key = keys_[k];
        if (meta.push) {
            CHECK_EQ(data.vals.size(), bytes_);
            Add(k, key.pushes[worker]++, data.vals.data());
            kv_.Response(meta, ps::KVPairs<char>());
            return;
        }
        int64_t iteration = key.pulls[worker]++;
        if (iteration < key.complete)
            Answer(k, iteration, Pull{meta, data.keys[0]});
        else
            key.waiting.push_back(Pull{meta, data.keys[0]});
    }

    void Add(size_t k, int64_t iteration, const char *values) {
        Key &key = keys_[k];
        char *sum = Sum(k, iteration);
        trace.Add((int64_t)bytes_);
        if (key.pushed[iteration % 2] == 0) {
            std::unique_lock<std::mutex> lock(mu_);
            changed_.wait(lock, [&] { return released_ >= iteration - 1; });
            memcpy(sum, values, bytes_);
        } else {
            for (size_t at = 0; at < bytes_; at += sizeof(Word)) {
                Word a, b;
                memcpy(&a, sum + at, sizeof(a));
                memcpy(&b, values + at, sizeof(b));
                a = (Word)(a + b);
                memcpy(sum + at, &a, sizeof(a));
            }
        }
        if (++key.pushed[iteration % 2] < ps::NumWorkers()) return;
        key.pushed[iteration % 2] = 0;
        key.complete = iteration + 1;
        for (const Pull &pull : key.waiting) Answer(k, iteration, pull);
        key.waiting.clear();
    }

    void Answer(size_t k, int64_t iteration, const Pull &pull) {
        ps::KVPairs<char> sums;
        sums.keys = ps::SArray<ps::Key>(1, pull.key);
        sums.vals = ps::SArray<char>(Sum(k, iteration), bytes_);
        sums.lens = ps::SArray<int>(1, (int)bytes_);
        kv_.Response(pull.meta, sums);
        std::lock_guard<std::mutex> lock(mu_);
        if (++answered_ % Pulls() == 0) changed_.notify_all();
    }

    int servers_;
    size_t bytes_;
    char *sums_;
    std::vector<Key> keys_;
    std::mutex mu_;
    std::condition_variable changed_;
    int64_t answered_ = 0, released_ = 0;
    ps::KVServer<char> kv_; /* last: its thread calls Handle */
};

/* They live as long as the process, which is killed. */
Worker *worker;
Server *server;

}  // namespace

extern "C" {

/* What the environment says: role, addresses. Blocks until all nodes are there. Their ranks are
 * ps-lite's own: by address. */
int pslite_start() {
    ps::Start(0, "flowslot-lab");
    return ps::MyRank();
}

void pslite_worker(int keys, int64_t bytes, char *gradient, char *weights) {
    worker = new Worker(keys, (size_t)bytes, gradient, weights);
}

/* Push the gradient, pull the weights: all of them. */
void pslite_exchange() { worker->Exchange(); }

void pslite_server(int keys, int64_t bytes, char *sums) {
    server = new Server(keys, (size_t)bytes, sums);
}

void pslite_serve(int64_t iterations) { server->Serve(iterations); }

void pslite_release(int64_t iterations) { server->Release(iterations); }

/* All nodes are ready. */
void pslite_barrier() { ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup); }

int64_t pslite_trace(int64_t first, int64_t room, int64_t *at_ns, int64_t *bytes) {
    return trace.Get(first, room, at_ns, bytes);
}
}
