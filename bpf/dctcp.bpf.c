/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * DCTCP (RFC 8257), a rival of the lab's on kernels that have none: the window shrinks by half the
 * share of bytes that were marked. port.bpf.c marks, at the switches' ports.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "GPL";

#define NEEDS_ECN 2
#define ONE 1024u     /* alpha and shares are in units of this */
#define GAIN_SHIFT 4  /* g = 1/16, RFC 8257, 3.3 */
#define DEMAND_CWR 4u /* TCP_ECN_DEMAND_CWR: acknowledgements carry ECE */

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

struct dctcp {
	__u32 alpha;
	__u32 window_end;    /* when this is acknowledged, a window has been seen */
	__u32 delivered;     /* segments, of all and of those that were marked, when it began */
	__u32 delivered_ce;
	__u32 rcv_nxt;       /* up to here, what has come bore `ce` */
	__u8 ce;
};

static __always_inline struct dctcp *state_of(struct sock *sk)
{
	return (struct dctcp *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

static __always_inline void begin_window(struct tcp_sock *tp, struct dctcp *d)
{
	d->window_end = tp->snd_nxt;
	d->delivered = tp->delivered;
	d->delivered_ce = tp->delivered_ce;
}

SEC("struct_ops/dctcp_init")
void BPF_PROG(dctcp_init, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *d = state_of(sk);

	d->alpha = ONE; /* RFC 8257, 4.2: the first mark halves */
	d->rcv_nxt = tp->rcv_nxt;
	d->ce = 0;
	begin_window(tp, d);
}

/* Once per window: the share of it that was marked, smoothed. */
SEC("struct_ops/dctcp_in_ack_event")
void BPF_PROG(dctcp_in_ack_event, struct sock *sk, __u32 flags)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *d = state_of(sk);
	__u32 all, marked, share;

	if ((__s32)(tp->snd_una - d->window_end) < 0)
		return;
	all = tp->delivered - d->delivered;
	marked = tp->delivered_ce - d->delivered_ce;
	share = all ? (__u64)marked * ONE / all : 0;
	if (share > ONE)
		share = ONE;
	d->alpha = d->alpha - (d->alpha >> GAIN_SHIFT) + (share >> GAIN_SHIFT);
	if (!share && d->alpha < 1 << GAIN_SHIFT)
		d->alpha = 0; /* the shift alone would never bring it there */
	begin_window(tp, d);
}

SEC("struct_ops/dctcp_ssthresh")
__u32 BPF_PROG(dctcp_ssthresh, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 cwnd = tp->snd_cwnd, less = (__u64)cwnd * state_of(sk)->alpha / (2 * ONE);

	return cwnd > less + 2 ? cwnd - less : 2;
}

/* RFC 8257, 3.2: an acknowledgement covers segments of one kind only, marked or not. */
SEC("struct_ops/dctcp_cwnd_event")
void BPF_PROG(dctcp_cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct dctcp *d = state_of(sk);
	__u8 ce = event == CA_EVENT_ECN_IS_CE;

	if (event != CA_EVENT_ECN_IS_CE && event != CA_EVENT_ECN_NO_CE)
		return;
	if (ce != d->ce) {
		if (icsk->icsk_ack.pending & ICSK_ACK_TIMER) {
			/* Of what came before, with what it bore. */
			if (d->ce)
				tp->ecn_flags |= DEMAND_CWR;
			else
				tp->ecn_flags &= ~DEMAND_CWR;
			bpf_tcp_send_ack(tp, d->rcv_nxt);
		}
		icsk->icsk_ack.pending |= ICSK_ACK_NOW;
	}
	d->rcv_nxt = tp->rcv_nxt;
	d->ce = ce;
	if (ce)
		tp->ecn_flags |= DEMAND_CWR;
	else
		tp->ecn_flags &= ~DEMAND_CWR;
}

SEC("struct_ops/dctcp_cong_avoid")
void BPF_PROG(dctcp_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

SEC("struct_ops/dctcp_undo_cwnd")
__u32 BPF_PROG(dctcp_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

/* The loader replaces the name by one that is unique on the host. */
SEC(".struct_ops")
struct tcp_congestion_ops dctcp_ops = {
	.init = (void *)dctcp_init,
	.in_ack_event = (void *)dctcp_in_ack_event,
	.ssthresh = (void *)dctcp_ssthresh,
	.cwnd_event = (void *)dctcp_cwnd_event,
	.cong_avoid = (void *)dctcp_cong_avoid,
	.undo_cwnd = (void *)dctcp_undo_cwnd,
	.flags = NEEDS_ECN,
	.name = "dctcp_ops",
};
