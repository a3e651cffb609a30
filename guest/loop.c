/* The loop: one thread, one epoll, and the reaping that is the duty of a PID 1. */
#include "guest.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#define EVENTS_A_TURN 32
#define REAPED_A_TURN_MAX 256
#define REST_AFTER_US 1000000u

static int control(struct guest *guest, int operation, int fd, uint32_t events, enum source source, unsigned index)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)source << 32 | index};
	return epoll_ctl(guest->epoll_fd, operation, fd, &event);
}

bool loop_watch(struct guest *guest, int fd, uint32_t events, enum source source, unsigned index)
{
	return control(guest, EPOLL_CTL_ADD, fd, events, source, index) == 0;
}

bool loop_rewatch(struct guest *guest, int fd, uint32_t events, enum source source, unsigned index)
{
	return control(guest, EPOLL_CTL_MOD, fd, events, source, index) == 0;
}

void loop_unwatch(struct guest *guest, int fd)
{
	(void)epoll_ctl(guest->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

void loop_close(struct guest *guest, int *fd)
{
	if (*fd < 0)
		return;
	loop_unwatch(guest, *fd);
	close_fd(fd);
}

/* True when more children may wait: a fork storm must not keep the loop from its other work. */
static bool reap(struct guest *guest)
{
	struct rusage usage;
	int status;
	for (int i = 0; i < REAPED_A_TURN_MAX; i++) {
		pid_t pid = wait4(-1, &status, WNOHANG | WUNTRACED, &usage);
		if (pid <= 0)
			return false;
		command_reaped(guest, pid, status, &usage);
	}
	return true;
}

static void take_signals(const struct guest *guest)
{
	struct signalfd_siginfo signals[8];
	ssize_t got;
	while ((got = read(guest->signal_fd, signals, sizeof signals)) > 0)
		for (size_t i = 0; i < (size_t)got / sizeof signals[0]; i++)
			if (signals[i].ssi_signo != SIGCHLD)
				_exit(0); /* never as PID 1, which does not ask for them; keepers end their trees */
}

static void dispatch(struct guest *guest, const struct epoll_event *event)
{
	enum source source = (enum source)(event->data.u64 >> 32);
	unsigned index = (unsigned)(event->data.u64 & UINT32_MAX);
	switch (source) {
	case SOURCE_LISTENER:
		connection_accept(guest);
		break;
	case SOURCE_CHILDREN:
		take_signals(guest);
		guest->children = true;
		break;
	case SOURCE_CONNECTION:
		connection_event(guest, index, event->events);
		break;
	case SOURCE_KEEPER:
	case SOURCE_STDOUT:
	case SOURCE_STDERR:
	case SOURCE_STDIN:
		command_event(guest, index, source);
		break;
	}
}

static void rest(struct guest *guest)
{
	for (unsigned i = 0; i < guest->commands_max; i++)
		for (unsigned s = 0; guest->commands[i] != NULL && s < 2; s++)
			stream_rest(&guest->commands[i]->streams[s]);
	pages_give_back(guest->scratch, sizeof guest->scratch);
	if (guest->out_count == 0)
		pages_give_back(guest->outbox, sizeof guest->outbox);
}

static int timeout_ms(const struct guest *guest)
{
	uint64_t first = command_deadline(guest), now;
	if (guest->rest_at_us != 0 && guest->rest_at_us < first)
		first = guest->rest_at_us;
	if (guest->children)
		return 0;
	if (first == UINT64_MAX)
		return -1;
	now = now_us();
	return first <= now ? 0 : (int)((first - now) / 1000 + 1);
}

void loop_turn(struct guest *guest)
{
	struct epoll_event events[EVENTS_A_TURN];
	int count = epoll_wait(guest->epoll_fd, events, EVENTS_A_TURN, timeout_ms(guest));
	for (int i = 0; i < count; i++)
		dispatch(guest, &events[i]);
	if (guest->children)
		guest->children = reap(guest);
	uint64_t now = now_us();
	command_tick(guest, now);
	connection_pump(guest);
	if (count > 0 && guest->rest_at_us == 0) {
		guest->rest_at_us = now + REST_AFTER_US;
	} else if (guest->rest_at_us != 0 && now >= guest->rest_at_us) {
		guest->rest_at_us = 0;
		rest(guest);
	}
}

void loop_run(struct guest *guest)
{
	for (;;)
		loop_turn(guest);
}
