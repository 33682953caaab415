/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * flowslot: a congestion control whose rates come from a table.
 *
 * The daemon writes a rate for each flow into fs_ctl, without a system call; this program paces
 * the flow at it from its next transmission on, tops it up while the path's queue is short, and
 * turns into ordinary TCP (Reno) when the entry's deadline passes. What it sees goes to fs_stat
 * and fs_events.
 *
 * All hooks run under the socket's lock, so `struct flow` needs no care. Only hooks and arguments
 * that are the same from Linux 6.1 on are used: cong_avoid (not cong_control, whose signature
 * changed) leaves loss recovery to the kernel, and min_tso_segs, which runs before every
 * transmission, has the last word on rate and window.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "flowslot.h"
#include "consts.h"
#include "maps.h"

char LICENSE[] SEC("license") = "GPL";

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_ssthresh(struct sock *sk) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

/* Per socket, in icsk_ca_priv (104 bytes, zeroed by the kernel for each new user). */
struct flow {
	__u64 cookie;     /* 0: nobody has asked for it yet, the daemon cannot know the flow */
	__u64 idle_ns;    /* everything sent is acknowledged, since then; 0: not idle */
	__u64 backlog_ns; /* more waits to be sent than a segment, since then; 0: not so */
	__u64 grown_ns;   /* when extra was last looked at */
	__u64 extra;
	__u64 drained;    /* the drain_at that was reported */
	__u64 owed_ns;    /* when owed was last brought up to date, */
	__u64 owed_sent;  /* and what had been sent then */
	__s64 owed;       /* bytes that the rate allowed and that were not sent */
	__u64 epoch_ns;   /* when rtt_now's began */
	__u32 rtt_now, rtt_before; /* lowest RTT of this epoch and the one before; all ones: none */
	__u32 slot;       /* 0: none */
	__u8 mode;
	__u8 woke_pacing; /* we turned on the socket's pacing */
};

static __always_inline struct flow *flow_of(struct sock *sk)
{
	return (struct flow *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

static __always_inline __u64 min64(__u64 a, __u64 b)
{
	return a < b ? a : b;
}

static __always_inline __u64 max64(__u64 a, __u64 b)
{
	return a > b ? a : b;
}

static __always_inline void addresses(struct sock *sk, __u16 *family, __u16 *sport, __u16 *dport,
				      __u8 *src, __u8 *dst)
{
	struct sock_common *c = &sk->__sk_common;

	*family = c->skc_family;
	*sport = bpf_ntohs(((struct inet_sock *)sk)->inet_sport); /* skc_num is 0 once closed */
	*dport = bpf_ntohs(c->skc_dport);
	if (c->skc_family == AF_INET) {
		*(__u32 *)src = c->skc_rcv_saddr;
		*(__u32 *)dst = c->skc_daddr;
		return;
	}
	if (!bpf_core_field_exists(c->skc_v6_daddr))
		return; /* a kernel without IPv6 */
#pragma unroll
	for (int i = 0; i < 4; i++) {
		((__u32 *)src)[i] = c->skc_v6_rcv_saddr.in6_u.u6_addr32[i];
		((__u32 *)dst)[i] = c->skc_v6_daddr.in6_u.u6_addr32[i];
	}
}

static __always_inline void tell(struct sock *sk, struct flow *f, __u32 kind, __u64 now)
{
	struct fs_event *e = bpf_ringbuf_reserve(&fs_events, sizeof(*e), 0);

	if (!e)
		return; /* full: the daemon finds out from fs_stat */
	__builtin_memset(e, 0, sizeof(*e));
	e->cookie = f->cookie;
	e->acked = ((struct tcp_sock *)sk)->bytes_acked;
	e->at_ns = now;
	e->kind = kind;
	e->slot = f->slot;
	addresses(sk, &e->family, &e->sport, &e->dport, e->src, e->dst);
	bpf_ringbuf_submit(e, 0);
}

/* Announce the flow once it has a cookie: a socket gets one when somebody asks (SO_COOKIE). */
static __noinline void announce(struct sock *sk, struct flow *f, __u64 now)
{
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	f->cookie = sk->__sk_common.skc_cookie.counter;
	if (!f->cookie || !st || !slot)
		return;
	__builtin_memset(st, 0, sizeof(*st));
	st->rate = FS_UNPACED;
	addresses(sk, &st->family, &st->sport, &st->dport, st->src, st->dst);
	st->acked = ((struct tcp_sock *)sk)->bytes_acked;
	__sync_lock_test_and_set(&st->cookie, f->cookie); /* last: an exchange is a barrier */
	tell(sk, f, FS_NEW, now);
}

/* The entry, if it is this flow's. */
static __always_inline struct fs_ctl *entry_of(struct flow *f)
{
	__u32 slot = f->slot;
	struct fs_ctl *ctl = bpf_map_lookup_elem(&fs_ctl, &slot);

	return ctl && slot && f->cookie && ctl->cookie == f->cookie ? ctl : NULL;
}

static __always_inline bool recovering(struct sock *sk)
{
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;

	return BPF_CORE_READ_BITFIELD(icsk, icsk_ca_state) != TCP_CA_Open;
}

/* Segments that keep `rate` busy with room to spare, and yet small bursts (a burst is at most
 * half a window): a flow notices a new rate only after its last burst at the old one. */
static __always_inline __u32 window(struct tcp_sock *tp, __u64 rate)
{
	__u64 rtt_us = max64(tp->srtt_us >> 3, FS_MIN_RTT_US);
	__u64 mss = max64(tp->mss_cache, 1);

	return max64(min64(2 * rate * rtt_us / 1000000 / mss, 1 << 20), FS_MIN_CWND);
}

static __always_inline void enter(struct sock *sk, struct flow *f, __u8 mode, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;

	f->extra = 0;
	f->grown_ns = now;
	f->owed = 0;
	f->owed_ns = now;
	f->owed_sent = tp->bytes_sent;
	/* The thresholds of the time when losses did not count say nothing; during recovery the
	 * kernel steers by this one. */
	if (f->mode == FS_RESERVED && !recovering(sk))
		tp->snd_ssthresh = TCP_INFINITE_SSTHRESH;
	f->mode = mode;
}

/*
 * What must be added to the rate to make good what late timers and busy processors lost. TCP's
 * pacing makes up for half a burst at most.
 */
static __always_inline __u64 catch_up(struct tcp_sock *tp, struct flow *f, __u64 rate, __u64 now)
{
	__u64 passed = min64(now - f->owed_ns, FS_OWED_NS);
	__s64 most = rate * FS_OWED_NS / FS_SECOND;

	f->owed += (__s64)(rate * passed / FS_SECOND) - (__s64)(tp->bytes_sent - f->owed_sent);
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

/* Set the rate and the window. */
static __always_inline void steer(struct sock *sk, struct flow *f, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct fs_ctl *ctl = entry_of(f);
	__u64 rate = FS_UNPACED;
	__u8 mode = FS_OPEN;
	__u32 cwnd;

	if (ctl && now <= ctl->deadline_ns) {
		mode = ctl->flags & FS_GUARANTEED ? FS_RESERVED : FS_CAPPED;
		if (mode != f->mode)
			enter(sk, f, mode, now);
		rate = max64(min64(ctl->reserved + f->extra, ctl->ceiling), FS_MIN_RATE);
		if (mode == FS_RESERVED)
			rate = min64(rate + catch_up(tp, f, rate, now),
				     max64(ctl->ceiling + ctl->ceiling / FS_OVER_SHARE, rate));
		cwnd = window(tp, rate);
		if (mode == FS_RESERVED) {
			if (recovering(sk))
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

static __always_inline void publish(struct sock *sk, struct flow *f, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	if (!st || !slot)
		return;
	st->acked = tp->bytes_acked;
	st->extra = f->extra;
	st->active_ns = now;
	st->unsent = tp->write_seq - tp->snd_nxt;
	st->srtt_us = tp->srtt_us >> 3;
	st->min_rtt_us = tp->rtt_min.s[0].v;
	st->retrans = tp->total_retrans;
	st->cwnd = tp->snd_cwnd;
	st->mode = f->mode;
}

/* The lowest RTT of this and the previous epoch: single samples also hold delayed ACKs. */
static __always_inline __u64 recent_rtt(struct flow *f, __s32 rtt_us, __u64 now)
{
	if (now - f->epoch_ns > FS_EPOCH_NS) {
		f->rtt_before = now - f->epoch_ns > 2 * FS_EPOCH_NS ? ~0U : f->rtt_now;
		f->rtt_now = ~0U;
		f->epoch_ns = now;
	}
	if (rtt_us >= 0 && (__u32)rtt_us < f->rtt_now)
		f->rtt_now = rtt_us;
	return f->rtt_now < f->rtt_before ? f->rtt_now : f->rtt_before;
}

/*
 * Top-up: while the flow has more to send than its reserved rate carries, and the path's queue is
 * short, extra grows; when the queue is not, it is gone at once, and so is the will to catch up.
 */
static __always_inline void top_up(struct tcp_sock *tp, struct flow *f, struct fs_ctl *ctl,
				   __s32 rtt_us, __u64 now)
{
	__u64 base = tp->rtt_min.s[0].v, gap = min64(now - f->grown_ns, FS_GROW_NS);
	__u64 rtt = recent_rtt(f, rtt_us, now), queue;

	if (ctl->base_rtt_us)
		base = min64(base, ctl->base_rtt_us);
	f->grown_ns = now;
	if (rtt == ~0U)
		return;
	queue = rtt > base ? (rtt - base) * 100 / max64(ctl->queue_us, 1) : 0;
	if (queue > FS_OWED_PERCENT && f->owed > 0)
		f->owed = 0;
	if (queue > FS_QUEUE_PERCENT) {
		f->extra = 0;
	} else if (f->backlog_ns && now - f->backlog_ns > FS_SETTLE_NS) {
		f->extra = min64(f->extra + (__u64)ctl->growth * gap / FS_MS,
				 ctl->ceiling > ctl->reserved ? ctl->ceiling - ctl->reserved : 0);
	}
}

SEC("struct_ops/fs_pkts_acked")
void BPF_PROG(fs_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *f = flow_of(sk);
	__u64 now = bpf_ktime_get_ns();
	struct fs_ctl *ctl = entry_of(f);
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	if (tp->write_seq - tp->snd_nxt <= tp->mss_cache) {
		f->backlog_ns = 0;
		f->owed = 0; /* it is not the rate that holds it back */
	} else if (!f->backlog_ns) {
		f->backlog_ns = now;
	}
	if (tp->write_seq == tp->snd_una)
		f->idle_ns = now;
	if (st && slot && sample->rtt_us >= 0)
		st->rtt_us = sample->rtt_us;
	if (ctl && f->mode == FS_RESERVED)
		top_up(tp, f, ctl, sample->rtt_us, now);
	publish(sk, f, now);
	if (ctl && ctl->drain_at && ctl->drain_at != f->drained &&
	    tp->bytes_acked >= ctl->drain_at) {
		f->drained = ctl->drain_at;
		tell(sk, f, FS_DRAINED, now);
	}
}

/* Runs before every transmission; returns the smallest burst. */
SEC("struct_ops/fs_min_tso_segs")
__u32 BPF_PROG(fs_min_tso_segs, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *f = flow_of(sk);
	__u64 now = bpf_ktime_get_ns();
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	if (!f->cookie)
		announce(sk, f, now);
	if (f->idle_ns && tp->write_seq != tp->snd_nxt) {
		/* The queue that the old top-up was fit for is history; others may start now too. */
		if (now - f->idle_ns > FS_GAP_NS)
			f->extra = 0;
		if (now - f->idle_ns >= FS_IDLE_NS && f->cookie)
			tell(sk, f, FS_START, now);
		f->idle_ns = 0;
		f->backlog_ns = 0;
		f->owed = 0;
		f->owed_ns = now;
	}
	steer(sk, f, now);
	publish(sk, f, now);
	if (st && slot)
		st->rate = sk->sk_pacing_rate; /* here only: at other times the kernel sets its own */
	return f->mode == FS_OPEN ? 2 : 1;
}

/*
 * How much a send buffer may hold, in windows. The kernel's two are a millisecond's worth for our
 * small windows: the application would have to wake up that often, and a held flow would have next
 * to nothing to send when its rate is raised. Hence the ceiling, not the rate.
 */
SEC("struct_ops/fs_sndbuf_expand")
__u32 BPF_PROG(fs_sndbuf_expand, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct flow *f = flow_of(sk);
	struct fs_ctl *ctl = entry_of(f);
	__u64 in_window = max64(tp->snd_cwnd, 10) * max64(tp->mss_cache, 1);

	if (!ctl || f->mode == FS_OPEN)
		return 2;
	return max64(2, min64(ctl->ceiling * FS_SNDBUF_NS / FS_SECOND / in_window, 1000));
}

SEC("struct_ops/fs_cong_avoid")
void BPF_PROG(fs_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	if (flow_of(sk)->mode != FS_RESERVED)
		tcp_reno_cong_avoid(sk, ack, acked);
}

SEC("struct_ops/fs_ssthresh")
__u32 BPF_PROG(fs_ssthresh, struct sock *sk)
{
	return tcp_reno_ssthresh(sk);
}

SEC("struct_ops/fs_undo_cwnd")
__u32 BPF_PROG(fs_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC("struct_ops/fs_init")
void BPF_PROG(fs_init, struct sock *sk)
{
	struct flow *f = flow_of(sk);
	__u64 now = bpf_ktime_get_ns();
	__u32 slot = 0, head = 0;
	struct fs_stat *top;

	f->cookie = 0;
	f->backlog_ns = 0;
	f->extra = 0;
	f->drained = 0;
	f->owed = 0;
	f->owed_ns = now;
	f->owed_sent = ((struct tcp_sock *)sk)->bytes_sent;
	f->epoch_ns = now;
	f->rtt_now = ~0U;
	f->rtt_before = ~0U;
	f->grown_ns = now;
	f->mode = FS_OPEN;
	f->woke_pacing = 0;
	f->idle_ns = 1; /* its first transmission is a start */
	if (bpf_map_pop_elem(&fs_free, &slot))
		slot = 0; /* all in use: ordinary TCP */
	f->slot = slot;
	top = bpf_map_lookup_elem(&fs_stat, &head);
	if (top && top->high < slot)
		top->high = slot;
	/* Without this the kernel ignores sk_pacing_rate. */
	if (sk->sk_pacing_status == SK_PACING_NONE) {
		sk->sk_pacing_status = SK_PACING_NEEDED;
		f->woke_pacing = 1;
	}
	sk->sk_pacing_rate = sk->sk_max_pacing_rate;
	announce(sk, f, now);
}

SEC("struct_ops/fs_release")
void BPF_PROG(fs_release, struct sock *sk)
{
	struct flow *f = flow_of(sk);
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	/* Leave the socket as it was, unless it asked for pacing itself in the meantime. */
	if (f->woke_pacing && sk->sk_max_pacing_rate == FS_UNPACED)
		sk->sk_pacing_status = SK_PACING_NONE;
	sk->sk_pacing_rate = sk->sk_max_pacing_rate;
	if (!slot || !st)
		return;
	st->cookie = 0;
	if (f->cookie)
		tell(sk, f, FS_CLOSED, bpf_ktime_get_ns());
	f->slot = 0;
	bpf_map_push_elem(&fs_free, &slot, 0);
}

/* The loader replaces the name, 15 characters, by one that is unique on the host. */
SEC(".struct_ops")
struct tcp_congestion_ops fs_ops = {
	.init = (void *)fs_init,
	.release = (void *)fs_release,
	.pkts_acked = (void *)fs_pkts_acked,
	.min_tso_segs = (void *)fs_min_tso_segs,
	.sndbuf_expand = (void *)fs_sndbuf_expand,
	.cong_avoid = (void *)fs_cong_avoid,
	.ssthresh = (void *)fs_ssthresh,
	.undo_cwnd = (void *)fs_undo_cwnd,
	.flags = TCP_CONG_NON_RESTRICTED,
	.name = "fs_placeholder_",
};
