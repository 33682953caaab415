/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * MLTCP's rule: by how much a flow's window grows faster or slower than plain TCP's, and how the
 * flow learns what an iteration of its job is. Plain C: tests compile it, too.
 *
 * An iteration ends with an idle gap: everything was acknowledged and nothing more was written.
 * A job also waits within an iteration, for other hosts: only a gap at least half as long as those
 * that ended iterations so far ends one. The bytes of an iteration are known once two iterations in
 * a row had nearly as many. Whatever is not known, or does not repeat, is plain TCP: F is 1.
 */
#ifndef MLTCP_H
#define MLTCP_H

#define MLTCP_ONE 1024u /* F and ratios are in units of this */
/* F(ratio) = slope * ratio + intercept; the same stands in core/flowslot/policy/mltcp.py. */
#define MLTCP_SLOPE 1792u    /* 1.75 */
#define MLTCP_INTERCEPT 256u /* 0.25 */

#define MLTCP_LEAST_GAP_NS 1000000ULL /* shorter pauses are never looked at */
#define MLTCP_GAP_SHIFT 3             /* of each gap that ends an iteration an eighth counts */
/* What ends an iteration is at least half as long as all other gaps of the iteration together: if
 * gaps twice as long as the one learnt come again and again like that, these are the ones; if
 * shorter ones last for longer than that without it, the one learnt is halved. */
#define MLTCP_LONGER 2
#define MLTCP_OTHERS 2
#define MLTCP_ALIKE_SHIFT 3 /* numbers of bytes that differ by an eighth at most are alike */
#define MLTCP_STRANGE 4     /* so many iterations in a row unlike the bytes known: not known */

struct mltcp {
	__u64 start;      /* bytes acknowledged when this iteration began */
	__u64 before;     /* bytes of the iteration before */
	__u64 total;      /* bytes of an iteration; 0: not known */
	__u64 idle_ns;    /* everything is acknowledged, since then; 0: not so */
	__u64 gap_ns;     /* the gap learnt */
	__u64 shorter_ns; /* idle in shorter ones since it was last met */
	__u64 longer_ns;  /* the last much longer one, */
	__u64 since_ns;   /* and idle since then */
	__u32 carry;      /* what rounding has kept back of the window's growth */
	__u32 strange;
	__u32 window; /* segments, before the kernel took some off because the flow was idle; or 0 */
};

static inline void mltcp_init(struct mltcp *m, __u64 acked)
{
	m->start = acked;
	m->before = 0;
	m->total = 0;
	m->idle_ns = 0;
	m->gap_ns = 2 * MLTCP_LEAST_GAP_NS;
	m->shorter_ns = 0;
	m->longer_ns = 0;
	m->since_ns = 0;
	m->carry = 0;
	m->strange = 0;
	m->window = 0;
}

static inline int mltcp_alike(__u64 a, __u64 b)
{
	__u64 more = a > b ? a : b, less = a > b ? b : a;

	return more - less <= more >> MLTCP_ALIKE_SHIFT;
}

/* Whether a much longer gap comes again and again. */
static inline int mltcp_again(const struct mltcp *m, __u64 gap)
{
	__u64 less = gap < m->longer_ns ? gap : m->longer_ns;

	return gap <= 2 * less && m->longer_ns <= 2 * less && m->since_ns <= MLTCP_OTHERS * less;
}

static inline void mltcp_learn_gap(struct mltcp *m, __u64 gap)
{
	m->shorter_ns = 0;
	if (gap < MLTCP_LONGER * m->gap_ns) {
		m->since_ns += gap;
		m->gap_ns -= m->gap_ns >> MLTCP_GAP_SHIFT;
		m->gap_ns += gap >> MLTCP_GAP_SHIFT;
		return;
	}
	if (mltcp_again(m, gap))
		m->gap_ns = gap < m->longer_ns ? gap : m->longer_ns;
	m->longer_ns = gap;
	m->since_ns = 0;
}

static inline void mltcp_learn_bytes(struct mltcp *m, __u64 bytes)
{
	if (mltcp_alike(bytes, m->before)) {
		m->total = bytes;
		m->strange = 0;
	} else if (m->total && mltcp_alike(bytes, m->total)) {
		m->strange = 0;
	} else if (m->total && ++m->strange >= MLTCP_STRANGE) {
		m->total = 0;
	}
	m->before = bytes;
}

/* The flow is idle as it is between all iterations. */
static inline int mltcp_awaited(const struct mltcp *m, __u64 now)
{
	return m->total && m->idle_ns && now - m->idle_ns <= MLTCP_LONGER * m->gap_ns;
}

/* The flow sends again after it was idle. `acked`: bytes acknowledged so far. Returns whether an
 * iteration begins by that. */
static inline int mltcp_send(struct mltcp *m, __u64 acked, __u64 now)
{
	__u64 gap = m->idle_ns ? now - m->idle_ns : 0;

	m->idle_ns = 0;
	if (gap < MLTCP_LEAST_GAP_NS)
		return 0;
	if (gap < m->gap_ns / 2) {
		m->shorter_ns += gap;
		m->since_ns += gap;
		if (m->shorter_ns > MLTCP_OTHERS * m->gap_ns) {
			m->gap_ns /= 2;
			m->shorter_ns = 0;
		}
		return 0;
	}
	mltcp_learn_bytes(m, acked - m->start);
	mltcp_learn_gap(m, gap);
	m->start = acked;
	return 1;
}

/* F of the bytes acknowledged in this iteration. Twice as many as there should be: its end was
 * missed. */
static inline __u32 mltcp_f(const struct mltcp *m, __u64 acked, __u32 slope, __u32 intercept)
{
	__u64 bytes = acked - m->start, ratio = MLTCP_ONE;

	if (!m->total || bytes >= 2 * m->total)
		return MLTCP_ONE;
	if (bytes < m->total)
		ratio = bytes * MLTCP_ONE / m->total;
	return slope * ratio / MLTCP_ONE + intercept;
}

/* How many acknowledged segments count, where `segments` were. */
static inline __u32 mltcp_scaled(struct mltcp *m, __u32 segments, __u32 f)
{
	__u64 sum = (__u64)segments * f + m->carry;

	m->carry = sum % MLTCP_ONE;
	return sum / MLTCP_ONE;
}

#endif
