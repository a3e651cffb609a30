/* The keeper of one command: a child of PID 1 that is the sub-reaper of all the command starts. It starts the first process,
 * signals the tree, reaps, and reports to PID 1 over a socket of whole messages. When PID 1 goes, it ends the tree and itself. */
#ifndef GUEST_KEEPER_H
#define GUEST_KEEPER_H

#include "frames.h"
#include "util.h"

#include <sys/resource.h>
#include <sys/types.h>

/* What holds for every command of this guest. */
struct house {
	int proc_fd; /* /proc, opened before any command could touch it */
	int null_fd;
	uid_t own_uid;	    /* PID 1 and keepers run as it; no command may */
	bool changes_user;  /* commands go back to root, or to who was asked for */
	struct rlimit files; /* as it was before PID 1 raised it for itself */
};

/* The command's ends of its pipes, or the terminal's master. */
struct wiring {
	int stdin_fd, stdout_fd, stderr_fd, master_fd;
};

enum report_kind { REPORT_STARTED, REPORT_FAILED, REPORT_ENDED, REPORT_SIGNALLED };

struct outcome {
	int status; /* as from wait */
	uint64_t cpu_us, peak_bytes, duration_us;
};

struct report {
	enum report_kind kind;
	pid_t pid;
	uint64_t pid_start;
	struct outcome outcome;
	bool tree_alive;
	struct fault fault; /* last: the other kinds are sent without it */
};

struct request {
	int signal_number;
};

void outcome_set(struct outcome *outcome, int status, const struct rusage *usage);

/* Runs in the forked child and never returns. `frame` is the EXEC, whose bytes it may change. `channel` leads to PID 1. */
_Noreturn void keeper_run(const struct house *house, struct frame *frame, struct wiring *wiring, int channel);

#endif
