#include "world.h"

#include "tape.h"
#include "proctree.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define FIRST_PID 100000
#define PIPES_KEPT 16u
#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

struct world world;
static int pipes[PIPES_KEPT][2], pair[2];
static unsigned pipe_count;

int __real_socketpair(int domain, int type, int protocol, int ends[2]);
int __real_pipe2(int ends[2], int flags);
int __real_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout);
int __wrap_socketpair(int domain, int type, int protocol, int ends[2]);
int __wrap_pipe2(int ends[2], int flags);
int __wrap_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout);
int __wrap_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_kill(pid_t pid, int number);
pid_t __wrap_fork(void);
pid_t __wrap_wait4(pid_t pid, int *status, int options, struct rusage *usage);

uint8_t pattern(unsigned stream, uint64_t offset)
{
	return (uint8_t)((stream == 0 ? 'a' : 'A') + offset % 23);
}

void world_open(struct guest *guest)
{
	memset(&world, 0, sizeof world);
	world.guest = guest;
	world.now_us = 1000000;
	world.accepted_fd = -1;
	pipe_count = 0;
	for (unsigned i = 0; i < WORKERS_MAX; i++)
		world.workers[i] = (struct worker){.channel = -1, .in = -1, .out = {-1, -1}};
}

static void close_worker(struct worker *worker)
{
	close_fd(&worker->channel);
	close_fd(&worker->in);
	for (unsigned s = 0; s < STREAMS; s++)
		close_fd(&worker->out[s]);
}

void world_close(void)
{
	for (unsigned i = 0; i < WORKERS_MAX; i++)
		close_worker(&world.workers[i]);
	close_fd(&world.accepted_fd);
}

int world_knock(void)
{
	int ends[2];
	close_fd(&world.accepted_fd);
	must(__real_socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
	world.accepted_fd = ends[1];
	return ends[0];
}

void worker_changes(unsigned index, int status)
{
	struct worker *worker = &world.workers[index];
	if (worker->pid == 0 || worker->reaped || world.deaths == WORKERS_MAX)
		return;
	if (!WIFSTOPPED(status)) {
		worker->reaped = true;
		close_fd(&worker->channel);
	}
	world.dead[world.deaths] = index;
	world.statuses[world.deaths++] = (unsigned)status;
	world.guest->children = true;
}

void worker_writes(struct worker *worker, unsigned stream, size_t size)
{
	uint8_t bytes[4096];
	while (size > 0 && worker->out[stream] >= 0) {
		size_t part = size < sizeof bytes ? size : sizeof bytes;
		for (size_t i = 0; i < part; i++)
			bytes[i] = pattern(stream, worker->written[stream] + i);
		ssize_t put = write(worker->out[stream], bytes, part);
		if (put <= 0)
			return;
		worker->written[stream] += (uint64_t)put;
		size -= (size_t)put;
	}
}

const struct worker *worker_of(pid_t keeper)
{
	for (unsigned i = 0; i < WORKERS_MAX; i++)
		if (keeper > 0 && world.workers[i].pid == keeper)
			return &world.workers[i];
	return NULL;
}

/* ---- the calls of the guest ---- */

static bool fails(int error)
{
	if (world.failures == 0)
		return false;
	world.failures--;
	errno = error;
	return true;
}

static int without_waiting(int fd)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	must(copy >= 0 && fcntl(copy, F_SETFL, O_NONBLOCK) == 0);
	return copy;
}

static int other_end(int ours, unsigned which)
{
	for (unsigned i = 0; i < PIPES_KEPT && i < pipe_count; i++) {
		const int *ends = pipes[(pipe_count - 1 - i) % PIPES_KEPT];
		if (ours >= 0 && ends[1 - which] == ours)
			return without_waiting(ends[which]);
	}
	return -1;
}

static void wire(struct worker *worker, const struct command *command)
{
	if (command->terminal) {
		int slave = ioctl(command->streams[0].fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
		must(slave >= 0);
		worker->out[0] = slave;
		worker->in = fcntl(slave, F_DUPFD_CLOEXEC, 3);
		return;
	}
	worker->in = other_end(command->input.fd, 0);
	for (unsigned s = 0; s < STREAMS; s++)
		worker->out[s] = other_end(command->streams[s].fd, 1);
}

pid_t __wrap_fork(void)
{
	unsigned index = 0;
	while (index < WORKERS_MAX && world.workers[index].pid != 0)
		index++;
	if (index == WORKERS_MAX) {
		errno = EAGAIN;
		return -1;
	}
	if (fails(EAGAIN))
		return -1;
	struct worker *worker = &world.workers[index];
	for (unsigned i = 0; i < COMMANDS_MAX; i++)
		if (world.guest->commands[i] != NULL && world.guest->commands[i]->channel == pair[0])
			wire(worker, world.guest->commands[i]);
	worker->channel = without_waiting(pair[1]);
	worker->pid = FIRST_PID + (pid_t)index;
	return worker->pid;
}

void keeper_run(const struct house *house, struct frame *frame, struct wiring *wiring, int channel)
{
	(void)house, (void)frame, (void)wiring, (void)channel;
	abort(); /* fork never says 0 here */
}

void outcome_set(struct outcome *outcome, int status, const struct rusage *usage)
{
	(void)usage;
	*outcome = (struct outcome){.status = status};
}

int proctree_kill(int proc_fd, proctree_root root, void *context)
{
	(void)proc_fd, (void)root, (void)context;
	return world.orphans > 0 ? world.orphans-- : 0;
}

pid_t __wrap_wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
	(void)pid, (void)options;
	if (world.deaths == 0) {
		errno = ECHILD;
		return -1;
	}
	memset(usage, 0, sizeof *usage);
	*status = (int)world.statuses[--world.deaths];
	return world.workers[world.dead[world.deaths]].pid;
}

int __wrap_kill(pid_t pid, int number)
{
	must(pid >= FIRST_PID && pid < FIRST_PID + (pid_t)WORKERS_MAX);
	if (number == 9)
		worker_changes((unsigned)(pid - FIRST_PID), number);
	return 0;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	(void)clock;
	*now = (struct timespec){.tv_sec = (time_t)(world.now_us / 1000000), .tv_nsec = (long)(world.now_us % 1000000) * 1000};
	return 0;
}

int __wrap_epoll_wait(int epoll_fd, struct epoll_event *events, int count, int timeout)
{
	(void)timeout;
	return __real_epoll_wait(epoll_fd, events, count, 0);
}

int __wrap_accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
	(void)fd, (void)address, (void)size, (void)flags;
	if (world.accepted_fd < 0 || fails(EMFILE)) {
		errno = EAGAIN;
		return -1;
	}
	return steal_fd(&world.accepted_fd);
}

int __wrap_socketpair(int domain, int type, int protocol, int ends[2])
{
	if (fails(EMFILE) || __real_socketpair(domain, type, protocol, ends) != 0)
		return -1;
	memcpy(pair, ends, sizeof pair);
	return 0;
}

int __wrap_pipe2(int ends[2], int flags)
{
	if (fails(EMFILE) || __real_pipe2(ends, flags) != 0)
		return -1;
	memcpy(pipes[pipe_count++ % PIPES_KEPT], ends, sizeof pipes[0]);
	return 0;
}
