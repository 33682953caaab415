/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The tables that the kernel program and the daemon share (flowslotd/pace/layout.py mirrors
 * them; tests/pacing/test_layout.py compares). Usable from C and from BPF, fixed-size types only.
 */
#ifndef FLOWSLOT_H
#define FLOWSLOT_H

#ifndef __VMLINUX_H__
#include <linux/types.h>
#endif

#define FS_UPLINKS 64

enum fs_mode {
	FS_OPEN = 0,     /* no entry, or its deadline has passed: ordinary TCP */
	FS_CAPPED = 1,   /* ordinary TCP, paced at reserved + top-up */
	FS_RESERVED = 2, /* paced at reserved + top-up, whatever is lost */
};

enum fs_kind {
	FS_NEW = 1,     /* a socket selected this congestion control */
	FS_CLOSED = 2,  /* it closed; not: it selected another */
	FS_DRAINED = 3, /* all up to drain_at was sent */
};

/* What the daemon wants of the flow in this slot; written through its mapping. Slot 0 is unused. */
struct fs_ctl {
	__u64 cookie;      /* whom the entry is for: a reused slot must not obey it */
	__u64 deadline_ns; /* CLOCK_MONOTONIC; past it the flow is open */
	__u64 reserved;    /* payload bytes/s */
	__u64 ceiling;     /* payload bytes/s; bounds reserved + top-up */
	__u64 drain_at;    /* report when so many bytes were sent; 0: never */
	__u32 growth;      /* top-up, with no queue: payload bytes/s per ms; 0: none */
	__u32 queue_us;    /* what counts of the time that the path's smallest buffer lasts: 5 ms at most */
	__u32 base_rtt_us; /* smallest RTT known for the path; 0: only the flow's own counts */
	__u32 guaranteed; /* 1: a live arbiter holds every link of the path */
	__u32 lender; /* slot of a flow of the same path whose rate is used while it is idle; 0: none */
	__u32 lender_cookie; /* low half of its cookie: its slot may go to another flow */
	__u32 burst; /* most that is made good at the ceiling of what was not sent while it might */
	__u32 least; /* payload bytes/s: a lower rate becomes this one */
	__u64 line;   /* payload bytes/s that the host's own link of the path carries */
	__u32 uplink; /* number of that link among the host's, 1 to FS_UPLINKS; others: not known */
	__u32 pad0;
};

/* What the kernel knows of the flow in this slot. Slot 0 holds `high` and nothing else. */
struct fs_stat {
	__u64 cookie; /* 0: free. Written last when a flow arrives, cleared first when it leaves */
	__u64 sent;   /* bytes, each once: `acked`, and what is on its way or about to leave */
	__u64 rate;   /* pacing rate now, payload bytes/s; all ones: unpaced */
	__u64 extra;  /* top-up within it */
	__u64 active_ns; /* last acknowledgement or transmission seen */
	__u32 unsent; /* bytes that the application wrote and TCP has not sent yet */
	__u32 srtt_us;
	__u32 min_rtt_us; /* all ones: not measured yet */
	__u32 rtt_us; /* latest sample */
	__u32 retrans; /* segments */
	__u32 cwnd;    /* segments */
	__u32 mode;    /* enum fs_mode */
	__u32 high;    /* slot 0: the highest slot ever used */
	__u16 family;  /* AF_INET (address in the first 4 bytes) or AF_INET6 */
	__u16 sport, dport;
	__u16 pad0;
	__u8 src[16], dst[16];
	__u64 drained; /* the drain_at that was reached, with nothing sent since then; 0: not so */
	__u64 acked; /* bytes, as tcp_info's tcpi_bytes_acked (SYN and FIN count one each) */
};

struct fs_event {
	__u64 cookie;
	__u64 sent;
	__u32 kind; /* enum fs_kind */
	__u32 slot;
};

#endif
