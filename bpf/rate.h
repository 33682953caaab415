/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The rate and the window of a flow: reserved rate, top-up, catching up. */
#ifndef FLOWSLOT_RATE_H
#define FLOWSLOT_RATE_H

/* How long acknowledgements have waited lately says nothing any more. */
static __always_inline void forget_back(struct flow *f)
{
	f->back_now = FS_BACK_NONE;
	f->back_before = FS_BACK_NONE;
	f->acks_now = 0;
	f->acks_before = 0;
}

/* Nor do the RTTs. */
static __always_inline void forget_rtt(struct flow *f)
{
	f->rtt_now = ~0U;
	f->rtt_before = ~0U;
	forget_back(f);
}

/* Begin a new epoch if it is time. Clocks of hosts run apart: what is known of them ages. */
static __always_inline void age(struct flow *f, __u32 now_us)
{
	__u32 passed = now_us - f->epoch_us;
	bool recent = passed <= 2 * FS_EPOCH_US;

	if (passed <= FS_EPOCH_US)
		return;
	f->rtt_before = recent ? f->rtt_now : ~0U;
	f->back_before = recent ? f->back_now : FS_BACK_NONE;
	f->acks_before = recent ? f->acks_now : 0;
	f->rtt_now = ~0U;
	f->back_now = FS_BACK_NONE;
	f->acks_now = 0;
	f->epoch_us = now_us;
	if (f->back_base)
		f->back_base += (passed + FS_DRIFT - 1) / FS_DRIFT;
}

/* us that the peer's clock moves on from one timestamp to the next; 0: it sends none. */
static __always_inline __u32 tick_us(struct tcp_sock *tp)
{
	if (!BPF_CORE_READ_BITFIELD(tp, rx_opt.tstamp_ok))
		return 0;
	if (bpf_core_field_exists(tp->tcp_usec_ts) && BPF_CORE_READ_BITFIELD(tp, tcp_usec_ts))
		return 1;
	return 1000;
}

/*
 * Whether the peer's clock can be read: for a while it has sent nothing but acknowledgements, and
 * nothing was lost. A peer that is paced itself stamps acknowledgements, too, with the time at which
 * its next segment is due.
 */
static __always_inline bool legible(struct sock *sk, struct flow *f, __u64 now)
{
	__u16 heard = ((struct tcp_sock *)sk)->data_segs_in, now_ms = now / FS_MS;

	if (heard != f->heard) {
		f->heard = heard;
		f->heard_ms = now_ms;
	}
	if (!recovering(sk) && (__u16)(now_ms - f->heard_ms) >= FS_QUIET_MS)
		return true;
	f->back_base = 0;
	forget_back(f);
	return false;
}

/*
 * Take in an acknowledgement: its RTT (-1: none), and how long it was on its way. The peer has
 * written its time into it. How far the two clocks are apart is not known, but the acknowledgement
 * that was quickest so far met no queue.
 */
static __always_inline void take_in(struct sock *sk, struct flow *f, __s32 rtt_us, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 now_us = now / 1000, tick = tick_us(tp), ahead;
	__s32 waited;

	age(f, now_us);
	if (rtt_us >= 0 && (__u32)rtt_us < f->rtt_now)
		f->rtt_now = rtt_us;
	if (!tick || !legible(sk, f, now))
		return;
	ahead = now_us - tp->rx_opt.rcv_tsval * tick;
	waited = ahead - f->back_base;
	if (waited < 0 || !f->back_base) {
		f->back_base = ahead ? ahead : 1;
		waited = 0;
	}
	if (waited < f->back_now)
		f->back_now = waited;
	if (f->acks_now < 255)
		f->acks_now++;
}

/* The lowest RTT of this epoch and the one before: single samples also hold delayed ACKs and busy
 * processors. All ones: there was none. */
static __always_inline __u32 recent_rtt(struct flow *f)
{
	return f->rtt_now < f->rtt_before ? f->rtt_now : f->rtt_before;
}

/*
 * How long acknowledgements have waited on their way back, us, likewise: others' queue, which this
 * flow neither fills nor can drain. The peer's clock only shows whole ticks: of n moments, the one
 * that is closest to a tick is 1 / (n + 1) of a tick behind it on average. Twice that is taken off;
 * where that is more than half of the queue that matters (`most`), nothing is known.
 */
static __always_inline __u32 waited_back(struct tcp_sock *tp, struct flow *f, __u64 most)
{
	__u32 least = f->back_now < f->back_before ? f->back_now : f->back_before;
	__u32 unsure = 2 * tick_us(tp) / (f->acks_now + f->acks_before + 1);

	if (least == FS_BACK_NONE || unsure > most / 2)
		return 0;
	return least > unsure ? least - unsure : 0;
}

/* Not even one segment of each of the job's flows fits into the buffer, all of them together. */
static __always_inline bool crowded(struct tcp_sock *tp, struct fs_ctl *ctl)
{
	return ctl->burst && (__u64)ctl->burst * 100 / FS_BURST_PERCENT < tp->mss_cache;
}

/* Segments that keep `rate` busy with room to spare, and yet small bursts (a burst is at most
 * half a window): a flow notices a new rate only after its last burst at the old one, and a large
 * burst does not fit into a shallow buffer. Where many flows share one, single segments: an
 * acknowledgement that waits for its host's own data makes a long RTT and a large window. */
static __always_inline __u32 window(struct tcp_sock *tp, struct flow *f, struct fs_ctl *ctl,
				    __u64 rate)
{
	__u64 rtt_us = recent_rtt(f), mss = max64(tp->mss_cache, 1), carries;

	if (rtt_us == ~0U)
		rtt_us = tp->rtt_min.s[0].v; /* a longer one shows soon enough */
	rtt_us = max64(min64(rtt_us, FS_MAX_RTT_US), FS_MIN_RTT_US);
	rtt_us += max64(rtt_us / 4, FS_MIN_RTT_US);
	carries = min64(rate * rtt_us / 1000000 / mss, 1 << 20);
	return crowded(tp, ctl) ? max64(FS_MIN_CWND, carries) : FS_MIN_CWND + carries;
}

static __always_inline void enter(struct sock *sk, struct flow *f, __u8 mode, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	int rto_min_us = FS_RTO_MIN_US;

	if (f->mode == FS_OPEN)
		bpf_setsockopt(sk, SOL_TCP, TCP_BPF_RTO_MIN, &rto_min_us, sizeof(rto_min_us));
	f->extra = 0;
	f->grown_us = now / 1000;
	f->owed = 0;
	f->owed_ns = now;
	f->owed_sent = tp->bytes_sent;
	f->credit = 0;
	/* The thresholds of the time when losses did not count say nothing; during recovery the
	 * kernel steers by this one. */
	if (f->mode == FS_RESERVED && !recovering(sk))
		tp->snd_ssthresh = TCP_INFINITE_SSTHRESH;
	f->mode = mode;
}

/*
 * A token bucket: what the reserved rate allowed and nobody sent may be sent at the ceiling later,
 * up to ctl->burst bytes. A phase, or a step of a ring, need not wait for its grant; bursts of a
 * job's flows together fit into the buffer.
 */
static __always_inline void credit(struct flow *f, struct fs_ctl *ctl, __s64 bytes)
{
	__s64 sum = (__s64)f->credit + bytes;

	if (sum > (__s64)ctl->burst)
		sum = ctl->burst;
	if (sum < -FS_AHEAD)
		sum = -FS_AHEAD;
	f->credit = sum;
}

/*
 * What must be added to the rate to make good what late timers and busy processors lost. TCP's
 * pacing makes up for half a burst at most.
 */
static __always_inline __u64 catch_up(struct tcp_sock *tp, struct flow *f, struct fs_ctl *ctl,
				      __u64 rate, __u64 now)
{
	__u64 passed = min64(now - f->owed_ns, FS_SECOND);
	__s64 sent = tp->bytes_sent - f->owed_sent, most = rate * FS_OWED_NS / FS_SECOND;

	credit(f, ctl, (__s64)(min64(ctl->reserved, FS_FAST) * passed / FS_SECOND) - sent);
	f->owed += (__s64)(rate * min64(passed, FS_OWED_NS) / FS_SECOND) - sent;
	f->owed_ns = now;
	f->owed_sent = tp->bytes_sent;
	if (f->owed > most)
		f->owed = most;
	if (f->owed < -FS_AHEAD)
		f->owed = -FS_AHEAD;
	if (f->owed <= 0)
		return 0;
	return min64(f->owed * FS_SECOND / FS_REPAY_NS, rate / FS_REPAY_SHARE);
}

/*
 * The rate that is reserved for this flow now: its own, and that of its lender while that has
 * drained. The daemon negotiates about it afterwards; until then the two have no more than before.
 */
static __always_inline __u64 reserved(struct fs_ctl *ctl, __u64 now)
{
	__u32 slot = ctl->lender;
	struct fs_stat *st;
	struct fs_ctl *lender;

	if (!slot)
		return ctl->reserved;
	lender = bpf_map_lookup_elem(&fs_ctl, &slot);
	st = bpf_map_lookup_elem(&fs_stat, &slot);
	if (!lender || !st || lender->cookie != st->cookie ||
	    (__u32)lender->cookie != ctl->lender_cookie || now > lender->deadline_ns ||
	    !lender->drain_at || st->drained != lender->drain_at)
		return ctl->reserved;
	return ctl->reserved + lender->reserved;
}

/* The rate of a held flow now, as far as its ceiling allows. */
static __always_inline __u64 lowest(struct tcp_sock *tp, struct flow *f, struct fs_ctl *ctl,
				    __u64 now)
{
	bool young = !f->backlog_ns || now - f->backlog_ns < FS_YOUNG_NS;

	return young && !crowded(tp, ctl) ? max64(ctl->least, FS_LEAST_RATE) : ctl->least;
}

/* Set the rate and the window. */
static __always_inline void steer(struct sock *sk, struct flow *f, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct fs_ctl *ctl = entry_of(f);
	__u64 rate = FS_UNPACED, most;
	__u8 mode = FS_OPEN;
	bool held;
	__u32 cwnd;

	if (ctl && now <= ctl->deadline_ns) {
		mode = ctl->guaranteed ? FS_RESERVED : FS_CAPPED;
		if (mode != f->mode)
			enter(sk, f, mode, now);
		rate = reserved(ctl, now);
		/* What a lender leaves is reserved, too; a rate of 0 would mean unpaced. */
		most = max64(min64(ctl->ceiling, left_by_others(f, ctl, now)), rate);
		f->extra = min64(f->extra, most - rate);
		rate = max64(rate + f->extra, 1);
		held = rate <= ctl->least;
		if (held)
			rate = max64(ctl->least, min64(lowest(tp, f, ctl, now), most));
		rate = min64(rate + catch_up(tp, f, ctl, rate, now),
			     max64(ctl->ceiling + ctl->ceiling / FS_OVER_SHARE, rate));
		if (f->credit >= (__s32)tp->mss_cache && most > rate) {
			rate = most;
			held = false;
		}
		/* Two segments of a held flow at once would take twice as long. */
		cwnd = held ? FS_MIN_CWND : window(tp, f, ctl, rate);
		if (mode == FS_RESERVED) {
			if (recovering(sk) && !crowded(tp, ctl))
				cwnd = max64(cwnd, FS_RECOVERY_CWND);
			tp->snd_cwnd = cwnd;
		} else if (tp->snd_cwnd > cwnd) {
			/* What the ceiling takes away was proven: slow start may regain it. */
			if (!recovering(sk) && tp->snd_ssthresh < tp->snd_cwnd)
				tp->snd_ssthresh = tp->snd_cwnd;
			tp->snd_cwnd = cwnd;
		}
	} else if (mode != f->mode) {
		enter(sk, f, mode, now);
	}
	sk->sk_pacing_rate = min64(rate, sk->sk_max_pacing_rate);
}

/*
 * A first segment leaves at once. Where the first segments of a job's flows do not fit into the
 * buffer together, the second ones would not, either: all flows would send them at the same time.
 * So the second ones are spread over the time that a segment takes. A held flow must notice a raise
 * soon.
 */
static __always_inline void spread(struct sock *sk, struct flow *f, struct fs_ctl *ctl)
{
	__u64 part;

	if (!ctl || f->mode == FS_OPEN || sk->sk_pacing_rate <= ctl->least ||
	    !crowded((struct tcp_sock *)sk, ctl))
		return;
	part = FS_SPREAD_FROM + (bpf_get_prandom_u32() & FS_SPREAD_MASK);
	sk->sk_pacing_rate = max64(sk->sk_pacing_rate * 1024 / part, 1);
}

/*
 * What waits to be sent, if that is a last segment which may leave at once; else 0. No hook runs
 * after a transmission, and a receiver may delay the acknowledgement of a last segment by 40 ms.
 */
static __always_inline __u32 last(struct sock *sk, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 unsent = tp->write_seq - tp->snd_nxt;
	bool fits = tp->packets_out < tp->snd_cwnd &&
		    (__u32)(tp->write_seq - tp->snd_una) <= tp->snd_wnd;

	if (recovering(sk) || !fits || tp->tcp_wstamp_ns > now || unsent > tp->mss_cache)
		return 0;
	return unsent;
}

static __always_inline void publish(struct sock *sk, struct flow *f, __u32 about, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	if (!st || !slot)
		return;
	/* It never falls: what was about to be sent may have had to wait. */
	st->sent = max64(st->sent, sent(tp, about));
	st->acked = tp->bytes_acked;
	st->extra = f->extra;
	st->active_ns = now;
	st->unsent = tp->write_seq - tp->snd_nxt - about;
	st->srtt_us = tp->srtt_us >> 3;
	st->min_rtt_us = tp->rtt_min.s[0].v;
	st->retrans = tp->total_retrans;
	st->cwnd = tp->snd_cwnd;
	st->mode = f->mode;
}

/* All bytes of the phase are sent: report that once, and let a borrower have the rate, unless more
 * is written than was announced, or lost bytes are being sent again. */
static __always_inline void drain(struct sock *sk, struct flow *f, struct fs_ctl *ctl, __u32 about)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);
	__u64 end = ctl ? ctl->drain_at : 0, now_sent = sent(tp, about);
	bool told = f->drained == end;

	if (!end || now_sent < end || (told && now_sent > end))
		return;
	f->drained = end;
	if (st && slot && tp->write_seq == tp->snd_nxt + about) /* before it is reported */
		st->drained = recovering(sk) && tp->snd_una != tp->write_seq ? 0 : end;
	if (!told)
		tell(sk, f, FS_DRAINED, now_sent);
}

/*
 * Top-up: while the flow has more to send than its reserved rate carries, extra grows, the slower
 * the longer the path's queue is; when that is too long, extra is gone at once, and when it is
 * longer than FS_BURST_PERCENT, the will to catch up.
 */
static __always_inline void top_up(struct tcp_sock *tp, struct flow *f, struct fs_ctl *ctl,
				   __u64 now)
{
	__u32 now_us = now / 1000, passed = now_us - f->grown_us;
	__u64 base = tp->rtt_min.s[0].v, gap = min64(passed, FS_GROW_US);
	__u64 rtt = recent_rtt(f), lasts = max64(ctl->queue_us, 1), queue, most;

	if (ctl->base_rtt_us)
		base = min64(base, ctl->base_rtt_us);
	f->grown_us = now_us;
	if (rtt == ~0U)
		return;
	most = lasts > FS_SPARE_US ? min64(lasts - FS_SPARE_US, FS_QUEUE_US) : 1;
	most = max64(most, lasts * FS_QUEUE_PERCENT / 100);
	queue = rtt > base ? rtt - base : 0;
	queue -= min64(queue, waited_back(tp, f, most));
	if (queue > lasts * FS_BURST_PERCENT / 100) {
		f->owed = f->owed < 0 ? f->owed : 0;
		f->credit = f->credit < 0 ? f->credit : 0;
	}
	if (queue > most) {
		f->extra = 0;
	} else if (f->backlog_ns && now - f->backlog_ns > FS_SETTLE_NS) {
		__u64 grows = (__u64)ctl->growth * gap * (most - queue);

		f->extra = min64(f->extra + grows / (1000 * most),
				 ctl->ceiling > ctl->reserved ? ctl->ceiling - ctl->reserved : 0);
	}
}

#endif
