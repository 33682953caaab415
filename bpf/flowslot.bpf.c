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
#include "flow.h"
#include "uplink.h"
#include "rate.h"

char LICENSE[] SEC("license") = "GPL";

extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_ssthresh(struct sock *sk) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

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
	take_in(sk, f, sample->rtt_us, now);
	if (ctl && f->mode != FS_OPEN)
		top_up(tp, f, ctl, now);
	claim(sk, f, ctl, ctl ? reserved(ctl, now) : 0, now);
	publish(sk, f, 0, now);
	drain(sk, f, ctl, 0);
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
	struct fs_ctl *ctl = entry_of(f);
	bool starts = f->idle_ns && tp->write_seq != tp->snd_nxt;
	__u32 about;

	if (!f->cookie)
		announce(sk, f);
	if (starts) {
		__u64 gap = now - f->idle_ns;

		/* The queue that the old top-up was fit for is history; others may start now too. */
		if (!ctl || gap > FS_GAP_NS)
			f->extra = 0;
		forget_rtt(f);
		f->backlog_ns = 0;
		f->owed = 0;
		f->owed_ns = now;
		if (ctl && f->credit < (__s64)ctl->burst)
			credit(f, ctl, ((__s64)ctl->burst - f->credit) *
					       min64(gap, FS_REFILL_NS) / FS_REFILL_NS);
		f->idle_ns = 0;
	}
	if (st && slot && tp->write_seq != tp->snd_nxt)
		st->drained = 0; /* the borrower must do without */
	steer(sk, f, now);
	if (starts)
		spread(sk, f, ctl);
	claim(sk, f, ctl, ctl ? reserved(ctl, now) : 0, now);
	about = last(sk, now);
	publish(sk, f, about, now);
	drain(sk, f, ctl, about);
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
	f->credit = 0;
	f->owed_ns = now;
	f->owed_sent = ((struct tcp_sock *)sk)->bytes_sent;
	f->epoch_us = now / 1000;
	f->back_base = 0;
	forget_rtt(f);
	f->heard = ((struct tcp_sock *)sk)->data_segs_in;
	f->heard_ms = now / FS_MS;
	f->grown_us = now / 1000;
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
	announce(sk, f);
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
	if (f->cookie && sk->__sk_common.skc_state == TCP_CLOSE) /* else it selected another */
		tell(sk, f, FS_CLOSED, sent((struct tcp_sock *)sk, 0));
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
