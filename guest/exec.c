/* EXEC: pipes or a terminal, a keeper, and a place in the table. */
#include "guest.h"

#include "privilege.h"
#include "pty.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#define ROWS_DEFAULT 24u
#define COLS_DEFAULT 80u

static void answer_limit(struct guest *guest, uint64_t id, int error, const char *text)
{
	struct builder builder = connection_reply(guest);
	build_begin(&builder, KIND_NOT_STARTED, id);
	build_number(&builder, TAG_ERRNO, (uint64_t)error);
	build_text(&builder, TAG_WHAT, "limit");
	build_text(&builder, TAG_TEXT, text);
	connection_replied(guest, &builder);
}

/* A pipe of which this side does not wait. `ours` is 0 for the reading end, 1 for the writing one. */
static bool open_pipe(int ends[2], int ours, struct fault *fault)
{
	if (pipe2(ends, O_CLOEXEC) != 0)
		return fault_set(fault, "pipe", errno, "a pipe for the command");
	if (fcntl(ends[ours], F_SETFL, O_NONBLOCK) != 0)
		return fault_set(fault, "pipe", errno, "a pipe for the command");
	return true;
}

static bool wire_terminal(struct command *command, const struct frame *frame, struct wiring *wiring)
{
	int master = pty_open_master(frame_number(frame, TAG_ROWS, ROWS_DEFAULT), frame_number(frame, TAG_COLS, COLS_DEFAULT),
				     &command->fault);
	if (master < 0)
		return false;
	command->streams[0].fd = master;
	command->input.terminal = true;
	command->input.fd = fcntl(master, F_DUPFD_CLOEXEC, 3); /* so that the loop can watch each way by itself */
	if (command->input.fd < 0)
		return fault_set(&command->fault, "pty", errno, "a second descriptor of the terminal");
	wiring->master_fd = master;
	return true;
}

static bool wire_pipes(const struct guest *guest, struct command *command, uint64_t options, struct wiring *wiring)
{
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
	bool wants_stdin = (options & OPTION_STDIN) != 0;
	bool made = (!wants_stdin || open_pipe(in, 1, &command->fault)) && open_pipe(out, 0, &command->fault) &&
		    open_pipe(err, 0, &command->fault);
	command->input.fd = in[1];
	command->streams[0].fd = out[0];
	command->streams[1].fd = err[0];
	wiring->stdin_fd = wants_stdin ? in[0] : guest->house.null_fd;
	wiring->stdout_fd = out[1];
	wiring->stderr_fd = err[1];
	return made;
}

static void close_wiring(const struct guest *guest, struct wiring *wiring)
{
	if (wiring->stdin_fd != guest->house.null_fd)
		close_fd(&wiring->stdin_fd);
	close_fd(&wiring->stdout_fd);
	close_fd(&wiring->stderr_fd);
}

static bool start_keeper(struct guest *guest, struct command *command, struct frame *frame, struct wiring *wiring)
{
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		return fault_set(&command->fault, "pipe", errno, "a channel to the keeper");
	command->channel = pair[0];
	command->begun_us = now_us();
	command->keeper_pid = fork();
	if (command->keeper_pid == 0)
		keeper_run(&guest->house, frame, wiring, pair[1]);
	close_fd(&pair[1]);
	if (command->keeper_pid < 0) {
		command->keeper_pid = 0;
		return fault_set(&command->fault, "fork", errno, "the command's keeper");
	}
	command->tree_alive = true;
	return true;
}

static bool watch_command(struct guest *guest, struct command *command, unsigned index)
{
	bool watched = loop_watch(guest, command->channel, EPOLLIN, SOURCE_KEEPER, index);
	for (unsigned s = 0; s < 2; s++) {
		struct stream *stream = &command->streams[s];
		if (stream->fd < 0)
			continue;
		stream->watched = loop_watch(guest, stream->fd, EPOLLIN, s == 0 ? SOURCE_STDOUT : SOURCE_STDERR, index);
		watched = watched && stream->watched;
	}
	return watched;
}

static struct command *new_command(struct guest *guest, uint64_t id, unsigned *index)
{
	for (*index = 0; *index < guest->commands_max && guest->commands[*index] != NULL; ++*index)
		;
	if (*index == guest->commands_max) {
		answer_limit(guest, id, EAGAIN, "the guest holds as many commands as it can");
		return NULL;
	}
	struct command *command = calloc(1, sizeof *command);
	if (command == NULL) {
		answer_limit(guest, id, ENOMEM, "no memory for a command");
		return NULL;
	}
	command->id = id;
	command->channel = command->input.fd = command->streams[0].fd = command->streams[1].fd = -1;
	command->streams[0].resumed = command->streams[1].resumed = true;
	guest->commands[*index] = command;
	return command;
}

void exec_command(struct guest *guest, struct frame *frame)
{
	struct wiring wiring = {.stdin_fd = -1, .stdout_fd = -1, .stderr_fd = -1, .master_fd = -1};
	uint64_t options = frame_number(frame, TAG_OPTIONS, 0);
	unsigned index;
	if (command_find(guest, frame->command) != NULL) {
		connection_complain(guest, frame->command, "a command of this number is held already");
		return;
	}
	struct command *command = new_command(guest, frame->command, &index);
	if (command == NULL)
		return;
	command->terminal = (options & OPTION_PTY) != 0;
	bool started = (command->terminal ? wire_terminal(command, frame, &wiring)
					  : wire_pipes(guest, command, options, &wiring)) &&
		       start_keeper(guest, command, frame, &wiring);
	close_wiring(guest, &wiring);
	if (started && watch_command(guest, command, index))
		return;
	if (!started) {
		command->failed = true;
		close_fd(&command->channel);
	}
	/* A keeper that cannot be watched loses its channel instead, and with it its command. */
	if (started)
		loop_close(guest, &command->channel);
	for (unsigned s = 0; s < 2; s++)
		loop_close(guest, &command->streams[s].fd);
	close_fd(&command->input.fd);
}
