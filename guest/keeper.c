#include "keeper.h"

#include "proctree.h"
#include "privilege.h"
#include "pty.h"
#include "start.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define REAPED_A_ROUND_MAX 256
#define KILL_AGAIN_MS 20 /* between looks for what escaped the last round */

struct keeper {
	const struct house *house;
	int channel, signal_fd;
	pid_t first;
	uint64_t started_us;
	struct outcome outcome;
	bool ended, told, alone, killing;
};

void outcome_set(struct outcome *outcome, int status, const struct rusage *usage)
{
	uint64_t seconds = (uint64_t)usage->ru_utime.tv_sec + (uint64_t)usage->ru_stime.tv_sec;
	outcome->status = status;
	outcome->cpu_us = seconds * 1000000u + (uint64_t)usage->ru_utime.tv_usec + (uint64_t)usage->ru_stime.tv_usec;
	outcome->peak_bytes = (uint64_t)usage->ru_maxrss * KIB;
}

static void tell(const struct keeper *keeper, struct report *report)
{
	size_t size = report->kind == REPORT_FAILED ? sizeof *report : offsetof(struct report, fault);
	(void)send(keeper->channel, report, size, MSG_NOSIGNAL);
}

_Noreturn static void fail(const struct keeper *keeper, const struct fault *fault)
{
	struct report report = {.kind = REPORT_FAILED, .fault = *fault};
	tell(keeper, &report);
	_exit(0);
}

static void reap(struct keeper *keeper)
{
	struct rusage usage;
	int status;
	for (int i = 0; i < REAPED_A_ROUND_MAX; i++) {
		pid_t pid = wait4(-1, &status, WNOHANG, &usage);
		if (pid <= 0) {
			keeper->alone = pid < 0 && errno == ECHILD;
			return;
		}
		if (pid == keeper->first) {
			outcome_set(&keeper->outcome, status, &usage);
			keeper->outcome.duration_us = now_us() - keeper->started_us;
			keeper->ended = true;
		}
	}
}

static void answer(struct keeper *keeper)
{
	struct request request;
	struct report report = {.kind = REPORT_SIGNALLED};
	ssize_t got = recv(keeper->channel, &request, sizeof request, 0);
	if (got < 0)
		return;
	if (got != (ssize_t)sizeof request || request.signal_number == SIGKILL)
		keeper->killing = true; /* asked to, or PID 1 is gone and nobody is left to ask */
	else
		(void)proctree_signal(keeper->house->proc_fd, request.signal_number, NULL, NULL);
	tell(keeper, &report);
}

_Noreturn static void keep(struct keeper *keeper)
{
	struct pollfd watched[2] = {{.fd = keeper->channel, .events = POLLIN}, {.fd = keeper->signal_fd, .events = POLLIN}};
	for (;;) {
		struct signalfd_siginfo drained[4];
		reap(keeper);
		if (keeper->ended && !keeper->told) {
			struct report report = {.kind = REPORT_ENDED, .outcome = keeper->outcome, .tree_alive = !keeper->alone};
			tell(keeper, &report);
			keeper->told = true;
		}
		if (keeper->alone)
			_exit(0);
		if (poll(watched, ARRAY_SIZE(watched), keeper->killing ? KILL_AGAIN_MS : -1) < 0)
			continue;
		if (watched[1].revents != 0)
			(void)!read(keeper->signal_fd, drained, sizeof drained);
		if (watched[0].revents != 0)
			answer(keeper);
		if (keeper->killing)
			(void)proctree_kill(keeper->house->proc_fd, NULL, NULL);
	}
}

static void open_signals(struct keeper *keeper)
{
	sigset_t child_signals;
	(void)sigemptyset(&child_signals);
	(void)sigaddset(&child_signals, SIGCHLD);
	keeper->signal_fd = signalfd(-1, &child_signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

void keeper_run(const struct house *house, struct frame *frame, struct wiring *wiring, int channel)
{
	struct keeper keeper = {.house = house, .channel = channel};
	struct start start = {.script_fd = -1};
	struct report report = {.kind = REPORT_STARTED};
	const int kept[] = {channel,	       house->proc_fd,	  house->null_fd,     wiring->stdin_fd,
			    wiring->stdout_fd, wiring->stderr_fd, wiring->master_fd};
	(void)prctl(PR_SET_NAME, "keeper", 0, 0, 0);
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0 || !privilege_close_others(kept, ARRAY_SIZE(kept))) {
		(void)fault_set(&start.fault, "fork", errno, "the command's keeper");
		fail(&keeper, &start.fault);
	}
	if (!start_prepare(&start, house, frame))
		fail(&keeper, &start.fault);
	if (wiring->master_fd >= 0 && !pty_open_slave(wiring, &start.identity, &start.fault))
		fail(&keeper, &start.fault);
	open_signals(&keeper);
	keeper.started_us = now_us();
	keeper.first = start_process(&start, house, wiring);
	if (keeper.first < 0)
		fail(&keeper, &start.fault);
	report.pid = keeper.first;
	report.pid_start = proctree_start(house->proc_fd, keeper.first);
	tell(&keeper, &report);
	/* Nobody but the command may hold its pipes now, or their ends would never come. */
	if (!privilege_close_others((const int[]){channel, keeper.signal_fd, house->proc_fd}, 3))
		keeper.killing = true;
	start_free(&start);
	pages_give_back(frame->body, frame->size); /* a long program need not lie here as long as it runs */
	keep(&keeper);
}
