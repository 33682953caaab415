/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What is kept per socket, where its entry is, and what the daemon is told about it. */
#ifndef FLOWSLOT_FLOW_H
#define FLOWSLOT_FLOW_H

/* Per socket, in icsk_ca_priv (104 bytes, zeroed by the kernel for each new user). */
struct flow {
	__u64 cookie;     /* 0: nobody has asked for it yet, the daemon cannot know the flow */
	__u64 idle_ns;    /* everything sent is acknowledged, since then; 0: not idle */
	__u64 backlog_ns; /* more waits to be sent than a segment, since then; 0: not so */
	__u64 extra;
	__u64 drained;    /* the drain_at that was reported */
	__u64 owed_ns;    /* when owed was last brought up to date, */
	__u64 owed_sent;  /* and what had been sent then */
	__s64 owed;       /* bytes that the rate allowed and that were not sent */
	__u32 grown_us;   /* when extra was last looked at */
	__u32 epoch_us;   /* when rtt_now's began */
	__u32 rtt_now, rtt_before; /* lowest RTT of this epoch and the one before; all ones: none */
	__u32 back_base;  /* least that a local time is ahead of the peer's; 0: not known */
	__u16 back_now, back_before; /* least time in queues on the way back, likewise, us */
	__u32 slot;       /* 0: none */
	__s32 credit;     /* what is left of the burst, bytes */
	/* Segments with data that the peer has sent, and when the last came. This wraps: once in
	 * 65 s a peer that sends none is taken for one that did, for FS_QUIET_MS. */
	__u16 heard, heard_ms;
	__u8 acks_now, acks_before; /* so many have told back_now and back_before */
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

/* Bytes that were sent, each counted once, plus `about`, which is about to be. */
static __always_inline __u64 sent(struct tcp_sock *tp, __u32 about)
{
	return tp->bytes_acked + (__u32)(tp->snd_nxt - tp->snd_una) + about;
}

static __always_inline void tell(struct sock *sk, struct flow *f, __u32 kind, __u64 bytes)
{
	struct fs_event *e = bpf_ringbuf_reserve(&fs_events, sizeof(*e), 0);

	if (!e)
		return; /* full: the daemon finds out when it next looks at fs_stat */
	e->cookie = f->cookie;
	e->sent = bytes;
	e->kind = kind;
	e->slot = f->slot;
	bpf_ringbuf_submit(e, 0);
}

/* Announce the flow once it has a cookie: a socket gets one when somebody asks (SO_COOKIE). */
static __noinline void announce(struct sock *sk, struct flow *f)
{
	__u32 slot = f->slot;
	struct fs_stat *st = bpf_map_lookup_elem(&fs_stat, &slot);

	f->cookie = sk->__sk_common.skc_cookie.counter;
	if (!f->cookie || !st || !slot)
		return;
	__builtin_memset(st, 0, sizeof(*st));
	st->rate = FS_UNPACED;
	st->min_rtt_us = ~0U;
	addresses(sk, &st->family, &st->sport, &st->dport, st->src, st->dst);
	st->sent = sent((struct tcp_sock *)sk, 0);
	st->acked = ((struct tcp_sock *)sk)->bytes_acked;
	__sync_lock_test_and_set(&st->cookie, f->cookie); /* last: an exchange is a barrier */
	tell(sk, f, FS_NEW, st->sent);
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

#endif
