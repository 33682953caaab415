/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relay.c - a long path of the lab: what the kernel hands to a TAP device comes back from it so much
 * later, in order. Super-packets pass whole, checksums stay to be done (IFF_VNET_HDR).
 *
 *   relay DEVICE DELAY_US MEMORY_BYTES COUNTS
 *
 * COUNTS: a file, see struct counts; the lab reads it. A frame that finds the memory full is dropped
 * and counted. Ends when the device does.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define TARDY_NS 1000000         /* so late, a frame counts as tardy */
#define MOST_FRAME (66 << 10)    /* a super-packet with its headers */
#define LEAST_MEMORY (1UL << 20)
#define MOST_MEMORY (1UL << 30)
#define MOST_DELAY_US 10000000UL
#define MOST_AT_ONCE 64 /* frames taken in before some are let out */
#define PRIORITY 10

/* All 64 bits, in the machine's order. */
struct counts {
    uint64_t came, left, dropped; /* frames */
    uint64_t late_ns, most_late_ns; /* beyond the delay: the sum, and the largest */
    uint64_t tardy;                 /* frames that were late by more than a millisecond */
};

/* Followed by its bytes; `next`: bytes from here to the next one. No bytes: it is at the beginning. */
struct frame {
    int64_t due_ns;
    uint32_t length, next;
};

struct queue {
    char *memory;
    size_t size, head, tail, waiting; /* head: where the next one goes; tail: the oldest */
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static unsigned long number(const char *text, const char *name, unsigned long least,
                            unsigned long most) {
    char *end;
    unsigned long value;
    errno = 0;
    value = strtoul(text, &end, 10);
    if (errno == 0 && end != text && *end == '\0' && value >= least && value <= most) return value;
    fprintf(stderr, "relay: %s must be from %lu to %lu, got %s\n", name, least, most, text);
    exit(2);
}

/* Room for a frame of any size; NULL: there is none. */
static struct frame *room(struct queue *queue) {
    const size_t most = sizeof(struct frame) + MOST_FRAME;
    if (queue->waiting == 0) queue->head = queue->tail = 0;
    if (queue->head >= queue->tail && (queue->waiting == 0 || queue->head != queue->tail)) {
        if (queue->size - queue->head >= most + sizeof(struct frame))
            return (struct frame *)(queue->memory + queue->head);
        if (queue->tail <= most) return NULL;
        ((struct frame *)(queue->memory + queue->head))->length = 0;
        queue->head = 0;
    }
    if (queue->tail - queue->head <= most) return NULL;
    return (struct frame *)(queue->memory + queue->head);
}

static void put(struct queue *queue, struct frame *frame, size_t length, int64_t due_ns) {
    frame->due_ns = due_ns;
    frame->length = (uint32_t)length;
    frame->next = (uint32_t)((sizeof(*frame) + length + 15) / 16 * 16);
    queue->head += frame->next;
    queue->waiting++;
}

/* The oldest; only while some wait. */
static struct frame *oldest(struct queue *queue) {
    struct frame *frame = (struct frame *)(queue->memory + queue->tail);
    if (frame->length != 0) return frame;
    queue->tail = 0;
    return (struct frame *)queue->memory;
}

static void take(struct queue *queue, struct frame *frame) {
    queue->tail += frame->next;
    queue->waiting--;
}

static void take_in(int fd, struct queue *queue, struct counts *counts, int64_t delay_ns) {
    static char lost[MOST_FRAME];
    for (int k = 0; k < MOST_AT_ONCE; k++) {
        struct frame *frame = room(queue);
        ssize_t n = read(fd, frame != NULL ? (char *)(frame + 1) : lost, MOST_FRAME);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) exit(0); /* the device is gone, and with it whoever would miss us */
        counts->came++;
        if (frame != NULL)
            put(queue, frame, (size_t)n, now_ns() + delay_ns);
        else
            counts->dropped++;
    }
}

static void let_out(int fd, struct queue *queue, struct counts *counts) {
    while (queue->waiting != 0) {
        struct frame *frame = oldest(queue);
        int64_t late = now_ns() - frame->due_ns;
        if (late < 0) return;
        if (write(fd, frame + 1, frame->length) == (ssize_t)frame->length)
            counts->left++;
        else
            counts->dropped++;
        counts->late_ns += (uint64_t)late;
        if ((uint64_t)late > counts->most_late_ns) counts->most_late_ns = (uint64_t)late;
        if (late > TARDY_NS) counts->tardy++;
        take(queue, frame);
    }
}

/* Until a frame comes, or the oldest is due. */
static void rest(int fd, struct queue *queue) {
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    struct timespec left = {0};
    if (queue->waiting != 0) {
        int64_t ns = oldest(queue)->due_ns - now_ns();
        if (ns <= 0) return;
        left.tv_sec = ns / INT64_C(1000000000);
        left.tv_nsec = ns % INT64_C(1000000000);
    }
    (void)ppoll(&ready, 1, queue->waiting != 0 ? &left : NULL, NULL);
}

static int device(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    if (strlen(name) >= sizeof(request.ifr_name)) {
        errno = ENAMETOOLONG;
        die(name);
    }
    strcpy(request.ifr_name, name);
    if (ioctl(fd, TUNSETIFF, &request) != 0) die(name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN) != 0)
        die("TUNSETOFFLOAD");
    return fd;
}

static struct counts *counted_in(const char *path) {
    struct counts *counts;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, sizeof(*counts)) != 0) die(path);
    counts = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (counts == MAP_FAILED) die(path);
    close(fd);
    return counts;
}

int main(int argc, char **argv) {
    const struct sched_param priority = {.sched_priority = PRIORITY};
    struct queue queue = {0};
    struct counts *counts;
    int64_t delay_ns;
    int fd;
    if (argc != 5) {
        fprintf(stderr, "usage: relay DEVICE DELAY_US MEMORY_BYTES COUNTS\n");
        return 2;
    }
    delay_ns = (int64_t)number(argv[2], "DELAY_US", 1, MOST_DELAY_US) * 1000;
    queue.size = number(argv[3], "MEMORY_BYTES", LEAST_MEMORY, MOST_MEMORY) / 16 * 16;
    queue.memory = mmap(NULL, queue.size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (queue.memory == MAP_FAILED) die("memory");
    counts = counted_in(argv[4]);
    fd = device(argv[1]);
    /* A wire does not wait for programs. Where that is not allowed, the counts tell. */
    if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0) perror("relay: no real-time priority");
    prctl(PR_SET_TIMERSLACK, 1);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        take_in(fd, &queue, counts, delay_ns);
        let_out(fd, &queue, counts);
        rest(fd, &queue);
    }
}
