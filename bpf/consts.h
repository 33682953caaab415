/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Measured reasons for these numbers: README.md. */
#ifndef FLOWSLOT_CONSTS_H
#define FLOWSLOT_CONSTS_H

#define AF_INET 2
#define AF_INET6 10
#define TCP_CONG_NON_RESTRICTED 1 /* jobs without privileges may select it */
#define TCP_INFINITE_SSTHRESH 0x7fffffff
#define FS_UNPACED (~0ULL)

#define SOL_TCP 6
#define TCP_BPF_RTO_MIN 1004

#define FS_MS 1000000ULL
#define FS_SECOND (1000 * FS_MS)

/* Window rule: cwnd = 3 + rate * (rtt + max(rtt / 4, 1 ms)) / mss, where rtt is the lowest of the
 * last 2 to 4 ms, and at least 1 ms. With 250 us a hiccup of the host (a millisecond is common)
 * runs a small window dry, and segments leave one by one, at a timer each. With 2 ms an incast has
 * four times a shallow buffer in flight, should its pacing fail for some milliseconds. A held flow
 * has the smallest window either way, and notices a raised rate as soon. Where a segment of each of
 * the job's flows does not fit into the buffer, the larger of the summands, also while recovering:
 * half a window is a burst. */
#define FS_MIN_CWND 3
#define FS_RECOVERY_CWND 10
#define FS_MIN_RTT_US 1000ULL
#define FS_MAX_RTT_US 1000000ULL

/* The kernel waits at least 200 ms before it sends again what nobody has acknowledged: three slots,
 * for paths of well below a millisecond. Receivers may delay an acknowledgement by 40 ms: then the
 * last segment is sent twice. There is no way back: the kernel's estimate only ever falls to a new
 * minimum, it does not rise to one. */
#define FS_RTO_MIN_US 20000

/* Send buffers grow until they hold what the ceiling carries in this time (and to tcp_wmem). */
#define FS_SNDBUF_NS (20 * FS_MS)

/* Top-up: the longer the queue that the RTT shows, the slower it grows. It is given up where that
 * is this share of the buffer; or lasts so long, as busy hosts are late by 1 to 2 ms, where it
 * leaves so much of the buffer. */
#define FS_QUEUE_PERCENT 20
#define FS_QUEUE_US 2000
#define FS_SPARE_US 3000
#define FS_EPOCH_US 2000
/* It is given up, too, when the flow was idle for so long. It begins after so long a backlog. */
#define FS_GAP_NS (1 * FS_MS)
#define FS_SETTLE_NS (1 * FS_MS)
/* A flow that has something to send and says nothing for so long, and for the time of two segments,
 * but at most a slot, cannot send it: its rate on the host's link is free. */
#define FS_RIVAL_NS (3 * FS_MS)
#define FS_RIVAL_MOST_NS (60 * FS_MS)
/* Acknowledgements further apart than this count as this. */
#define FS_GROW_US 2000

/* Of the way back: nothing is known; for so long the peer must have sent no data; and one part in so
 * many by which clocks may run apart. */
#define FS_BACK_NONE 0xffff
#define FS_QUIET_MS 100
#define FS_DRIFT 4096

/* Catching up: so much of the past counts, is repaid within so long, by at most one part in so
 * many of the rate. Bytes ahead of the rate count up to FS_AHEAD. */
#define FS_OWED_NS (2 * FS_MS)
#define FS_REPAY_NS (4 * FS_MS)
#define FS_REPAY_SHARE 4
#define FS_OVER_SHARE 32
#define FS_AHEAD (1 << 17)

/* Starts: the gap after a flow's first segment takes 0.4 to 1.4 of what a segment takes, in 1024ths
 * of half a gap: of the first gap after idleness the kernel waits half. The first segments have left
 * the buffer by then. */
#define FS_SPREAD_FROM 819
#define FS_SPREAD_MASK 2047

/* A held flow, whose reserved rate and top-up are no more than its least rate, notices a raise after
 * its last segment at the old rate. Most raises come soon. So while it has had a backlog of more than
 * a segment for less than this, or has none, it has so many bytes/s (LEAST_RATE), and notices a raise
 * within 6 ms. */
#define FS_YOUNG_NS (10 * FS_MS)
#define FS_LEAST_RATE 256000ULL

/* Bursts of a job fill this part of the buffer at most; a queue of this part ends bursts and catching
 * up. An idle flow's credit is whole again after so long, whatever its rate. */
#define FS_BURST_PERCENT 60
#define FS_REFILL_NS (10 * FS_MS)
#define FS_FAST (1ULL << 33) /* bytes/s; credit of one second still fits into 64 bits */

#endif
