/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * MLTCP: Reno and CUBIC whose window grows F(bytes_ratio) times as fast, where bytes_ratio is the
 * part of a training iteration's bytes that has been acknowledged. Flows that are ahead get more,
 * until jobs that share a link take turns. Neither switch nor daemon is needed: `flowslot mltcp on`.
 *
 * Everything else is the kernel's own Reno and CUBIC. Slow start is not scaled: what the paper
 * scales is the additive increase.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "mltcp.h"

char LICENSE[] SEC("license") = "GPL";

#define NON_RESTRICTED 1 /* TCP_CONG_NON_RESTRICTED: jobs without privileges may select it */
#define LEAST_SEGMENTS 2 /* net.ipv4.tcp_min_tso_segs, as it comes */
#define SECOND_US 1000000ULL

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_ssthresh(struct sock *sk) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;
extern void cubictcp_init(struct sock *sk) __ksym;
extern __u32 cubictcp_recalc_ssthresh(struct sock *sk) __ksym;
extern void cubictcp_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern void cubictcp_state(struct sock *sk, __u8 new_state) __ksym;
extern void cubictcp_cwnd_event(struct sock *sk, enum tcp_ca_event event) __ksym;
extern void cubictcp_acked(struct sock *sk, const struct ack_sample *sample) __ksym;

/* All of .rodata: the loader may set others. */
const volatile struct {
	__u32 slope, intercept;
} line = { MLTCP_SLOPE, MLTCP_INTERCEPT };

/* CUBIC needs most of icsk_ca_priv. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct mltcp);
} mltcp_flows SEC(".maps");

/* Iterations whose bytes were known when they began, of all flows. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} mltcp_counts SEC(".maps");

static __always_inline struct mltcp *state_of(struct sock *sk)
{
	return bpf_sk_storage_get(&mltcp_flows, sk, 0, 0);
}

static __always_inline void begin(struct sock *sk)
{
	struct mltcp *m = bpf_sk_storage_get(&mltcp_flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (m) /* else there is no memory: plain TCP */
		mltcp_init(m, ((struct tcp_sock *)sk)->bytes_acked);
}

static __always_inline void acknowledged(struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct mltcp *m = state_of(sk);

	if (m && tp->write_seq == tp->snd_una)
		m->idle_ns = bpf_ktime_get_ns();
}

/*
 * After an idle time of a timeout the kernel takes half of the window off, and half again for each
 * further one: nobody knows what the network is like by now. A job that computes for so long would
 * have that in every iteration, and what F has made of its window would be lost. It is no more idle
 * than it always is: once that is known, it keeps its window.
 */
static __always_inline void sends(struct sock *sk, enum tcp_ca_event event)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u64 *known, now = bpf_ktime_get_ns();
	struct mltcp *m = state_of(sk);
	__u32 zero = 0;

	/* It comes again for each segment that is written before the first one can be sent. */
	if (m && event == CA_EVENT_CWND_RESTART && m->window < tp->snd_cwnd)
		m->window = tp->snd_cwnd;
	if (!m || event != CA_EVENT_TX_START)
		return;
	if (m->window > tp->snd_cwnd && mltcp_awaited(m, now))
		tp->snd_cwnd = m->window;
	m->window = 0;
	if (!mltcp_send(m, tp->bytes_acked, now))
		return;
	known = bpf_map_lookup_elem(&mltcp_counts, &zero);
	if (known && m->total)
		__sync_fetch_and_add(known, 1);
}

static __always_inline __u32 f_of(struct tcp_sock *tp, struct mltcp *m)
{
	return mltcp_f(m, tp->bytes_acked, line.slope, line.intercept);
}

/* How many acknowledged segments count. */
static __always_inline __u32 counted(struct sock *sk, __u32 acked)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct mltcp *m = state_of(sk);

	if (!m || tp->snd_cwnd < tp->snd_ssthresh)
		return acked;
	return mltcp_scaled(m, acked, f_of(tp, m));
}

/*
 * Runs before every transmission; returns the smallest burst, as the kernel has it. Where the own
 * NIC is the bottleneck, cwnd decides nothing: what a socket has in the NIC's queue is bounded by
 * TCP small queues, at about a millisecond of sk_pacing_rate. That bound is the window there, and
 * is scaled, too: the rate is the kernel's own (tcp_update_pacing_rate) times F. Where cwnd decides,
 * or something paces by that rate, it is left alone: it also sets the length of bursts, and ports
 * that are full lose long ones.
 */
SEC("struct_ops/ml_min_tso_segs")
__u32 BPF_PROG(ml_min_tso_segs, struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct mltcp *m = state_of(sk);
	__u64 window, rate;

	if (!m || !tp->srtt_us || sk->sk_pacing_status != SK_PACING_NONE ||
	    BPF_CORE_READ_BITFIELD(tp, is_cwnd_limited))
		return LEAST_SEGMENTS;
	window = tp->snd_cwnd > tp->packets_out ? tp->snd_cwnd : tp->packets_out;
	rate = window * tp->mss_cache * (8 * SECOND_US) / tp->srtt_us;
	rate = rate * (tp->snd_cwnd < tp->snd_ssthresh / 2 ? 200 : 120) / 100;
	rate = rate * f_of(tp, m) / MLTCP_ONE;
	sk->sk_pacing_rate = rate < sk->sk_max_pacing_rate ? rate : sk->sk_max_pacing_rate;
	return LEAST_SEGMENTS;
}

SEC("struct_ops/mlr_init")
void BPF_PROG(mlr_init, struct sock *sk)
{
	begin(sk);
}

SEC("struct_ops/mlr_pkts_acked")
void BPF_PROG(mlr_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	acknowledged(sk);
}

SEC("struct_ops/mlr_cwnd_event")
void BPF_PROG(mlr_cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	sends(sk, event);
}

SEC("struct_ops/mlr_cong_avoid")
void BPF_PROG(mlr_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, counted(sk, acked));
}

SEC("struct_ops/mlr_ssthresh")
__u32 BPF_PROG(mlr_ssthresh, struct sock *sk)
{
	return tcp_reno_ssthresh(sk);
}

SEC("struct_ops/ml_undo_cwnd")
__u32 BPF_PROG(ml_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC("struct_ops/mlc_init")
void BPF_PROG(mlc_init, struct sock *sk)
{
	begin(sk);
	cubictcp_init(sk);
}

SEC("struct_ops/mlc_pkts_acked")
void BPF_PROG(mlc_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	acknowledged(sk);
	cubictcp_acked(sk, sample);
}

SEC("struct_ops/mlc_cwnd_event")
void BPF_PROG(mlc_cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	sends(sk, event);
	cubictcp_cwnd_event(sk, event);
}

/* Also CUBIC's estimate of what Reno would have grows by what counts. */
SEC("struct_ops/mlc_cong_avoid")
void BPF_PROG(mlc_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	cubictcp_cong_avoid(sk, ack, counted(sk, acked));
}

SEC("struct_ops/mlc_ssthresh")
__u32 BPF_PROG(mlc_ssthresh, struct sock *sk)
{
	return cubictcp_recalc_ssthresh(sk);
}

SEC("struct_ops/mlc_set_state")
void BPF_PROG(mlc_set_state, struct sock *sk, __u8 new_state)
{
	cubictcp_state(sk, new_state);
}

SEC(".struct_ops")
struct tcp_congestion_ops mltcp_reno = {
	.init = (void *)mlr_init,
	.pkts_acked = (void *)mlr_pkts_acked,
	.cwnd_event = (void *)mlr_cwnd_event,
	.cong_avoid = (void *)mlr_cong_avoid,
	.min_tso_segs = (void *)ml_min_tso_segs,
	.ssthresh = (void *)mlr_ssthresh,
	.undo_cwnd = (void *)ml_undo_cwnd,
	.flags = NON_RESTRICTED,
	.name = "mltcp_reno",
};

SEC(".struct_ops")
struct tcp_congestion_ops mltcp_cubic = {
	.init = (void *)mlc_init,
	.pkts_acked = (void *)mlc_pkts_acked,
	.cwnd_event = (void *)mlc_cwnd_event,
	.cong_avoid = (void *)mlc_cong_avoid,
	.min_tso_segs = (void *)ml_min_tso_segs,
	.ssthresh = (void *)mlc_ssthresh,
	.set_state = (void *)mlc_set_state,
	.undo_cwnd = (void *)ml_undo_cwnd,
	.flags = NON_RESTRICTED,
	.name = "mltcp_cubic",
};
