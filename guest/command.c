/* The table of commands: what the edge asks of them, what their keepers report, and their end. */
#include "guest.h"

#include "proctree.h"
#include "pty.h"

#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define READS_A_TURN_MAX 4		/* of one stream, so that no command keeps the loop */
#define KEEPER_ANSWERS_WITHIN_US 1000000u
#define KEEPER_STOPS_MAX 100u		/* it is continued so often; then it is taken for dead */
#define HUNT_AGAIN_US 20000u
#define REAPED_A_TURN_MAX 256

static unsigned index_of(const struct guest *guest, const struct command *command)
{
	unsigned index = 0;
	while (guest->commands[index] != command)
		index++;
	return index;
}

struct command *command_find(struct guest *guest, uint64_t id)
{
	for (unsigned i = 0; i < guest->commands_max; i++)
		if (guest->commands[i] != NULL && guest->commands[i]->id == id)
			return guest->commands[i];
	return NULL;
}

void command_free(struct guest *guest, unsigned index)
{
	struct command *command = guest->commands[index];
	guest->commands[index] = NULL;
	loop_close(guest, &command->channel);
	for (unsigned s = 0; s < 2; s++) {
		loop_close(guest, &command->streams[s].fd);
		stream_free(&command->streams[s]);
	}
	loop_close(guest, &command->input.fd);
	input_free(&command->input);
	free(command);
}

static void close_stream(struct guest *guest, struct stream *stream)
{
	loop_close(guest, &stream->fd);
	stream->watched = false;
}

static void watch_stream(struct guest *guest, struct command *command, unsigned which, bool wanted)
{
	struct stream *stream = &command->streams[which];
	if (stream->watched == wanted || stream->fd < 0)
		return;
	/* Not watched at all rather than for nothing: a closed pipe would be reported again and again. */
	if (!wanted)
		loop_unwatch(guest, stream->fd);
	else if (!loop_watch(guest, stream->fd, EPOLLIN, which == 0 ? SOURCE_STDOUT : SOURCE_STDERR, index_of(guest, command)))
		return;
	stream->watched = wanted;
}

static void read_stream(struct guest *guest, struct command *command, unsigned which)
{
	struct stream *stream = &command->streams[which];
	enum stream_state state = STREAM_MORE;
	if (stream->fd < 0)
		return;
	for (int i = 0; i < READS_A_TURN_MAX && state == STREAM_MORE; i++)
		state = stream_read(stream, guest->scratch, SCRATCH_BYTES);
	if (state == STREAM_DRY)
		stream->settled = stream->total;
	if (state == STREAM_ENDED)
		close_stream(guest, stream);
	else
		watch_stream(guest, command, which, state != STREAM_FULL);
}

static void sync_input(struct guest *guest, struct command *command)
{
	struct input *input = &command->input;
	if (input->fd < 0)
		return;
	if (input->over) {
		loop_close(guest, &input->fd);
		input_free(input);
		return;
	}
	bool wanted = input_waits(input);
	if (wanted == input->watched)
		return;
	if (!wanted)
		loop_unwatch(guest, input->fd);
	else if (!loop_watch(guest, input->fd, EPOLLOUT, SOURCE_STDIN, index_of(guest, command)))
		return;
	input->watched = wanted;
}

/* Ends the command once its first process and its output have ended, or once others may no longer hold the output back. */
static void settle(struct guest *guest, struct command *command, uint64_t now)
{
	if (!command->ended || command->complete)
		return;
	for (unsigned s = 0; s < 2; s++) {
		const struct stream *stream = &command->streams[s];
		if (stream->fd >= 0 && (now < command->detach_at_us || stream->total < stream->settled))
			return;
	}
	for (unsigned s = 0; s < 2; s++) {
		if (command->streams[s].fd < 0)
			continue;
		command->streams[s].dropping = command->detached = true;
		watch_stream(guest, command, s, true);
	}
	command->complete = true;
	command->input.over = true;
	sync_input(guest, command);
}

static void begin_end(struct guest *guest, struct command *command, uint64_t now)
{
	command->ended = true;
	command->detach_at_us = now + DETACH_AFTER_US;
	for (unsigned s = 0; s < 2; s++) {
		stream_settle(&command->streams[s]);
		read_stream(guest, command, s);
	}
	settle(guest, command, now);
}

/* ---- what the edge asks ---- */

static void on_stdin(struct guest *guest, struct command *command, const struct frame *frame)
{
	struct field data = {0};
	const char *why = NULL;
	(void)frame_find(frame, TAG_DATA, &data);
	if (command->input.fd < 0)
		return; /* the edge has been told, or will be by the result */
	why = input_offer(&command->input, frame_number(frame, TAG_OFFSET, 0), data.data, data.size,
			  frame_number(frame, TAG_EOF, 0) != 0);
	sync_input(guest, command);
	if (why != NULL)
		connection_complain(guest, command->id, why);
}

static void on_signal(struct guest *guest, struct command *command, const struct frame *frame)
{
	struct request request = {.signal_number = (int)(frame_number(frame, TAG_SIGNAL, 0) & 0xffff)};
	if (request.signal_number < 1 || request.signal_number > 64) {
		connection_complain(guest, command->id, "there is no such signal");
		return;
	}
	if (command->channel < 0)
		return; /* nothing is left of its tree, or PID 1 is ending it */
	if (send(command->channel, &request, sizeof request, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EAGAIN)
		connection_complain(guest, command->id, "the keeper is behind with signals");
	if (request.signal_number == SIGKILL && command->answer_by_us == 0)
		command->answer_by_us = now_us() + KEEPER_ANSWERS_WITHIN_US;
}

static void on_resize(struct guest *guest, struct command *command, const struct frame *frame)
{
	if (!command->terminal)
		connection_complain(guest, command->id, "it has no terminal");
	else if (command->streams[0].fd >= 0)
		(void)pty_resize(command->streams[0].fd, frame_number(frame, TAG_ROWS, 0), frame_number(frame, TAG_COLS, 0));
}

static struct stream *stream_of(struct guest *guest, struct command *command, const struct frame *frame, uint64_t *offset)
{
	uint64_t which = frame_number(frame, TAG_STREAM, 0);
	*offset = frame_number(frame, TAG_OFFSET, 0);
	if (which != 1 && which != 2) {
		connection_complain(guest, command->id, "STREAM is neither 1 nor 2");
		return NULL;
	}
	struct stream *stream = &command->streams[which - 1];
	if (*offset > stream->total) {
		connection_complain(guest, command->id, "OFFSET lies past what the command has written");
		return NULL;
	}
	return stream;
}

static void on_ack(struct guest *guest, struct command *command, const struct frame *frame)
{
	uint64_t offset;
	struct stream *stream = stream_of(guest, command, frame, &offset);
	if (stream == NULL || offset <= stream->acked)
		return;
	stream->acked = offset;
	if (stream->sent < offset)
		stream->sent = offset;
	if (stream->fd < 0)
		stream_rest(stream);
	else if (!stream->watched) {
		read_stream(guest, command, (unsigned)(stream - command->streams));
		settle(guest, command, now_us());
	}
}

static void on_resume(struct guest *guest, struct command *command, const struct frame *frame)
{
	uint64_t offset;
	struct stream *stream = stream_of(guest, command, frame, &offset);
	if (stream == NULL)
		return;
	stream->resumed = true;
	stream->sent = offset > stream->acked ? offset : stream->acked;
	command->input.ack_due = command->input.ack_due || command->input.taken > 0 || command->input.lost;
}

static void on_forget(struct guest *guest, struct command *command)
{
	if (!command->failed && !command->complete) {
		connection_complain(guest, command->id, "it has not ended: it cannot be forgotten yet");
		return;
	}
	command->forgotten = true;
	for (unsigned s = 0; s < 2; s++) {
		command->streams[s].acked = command->streams[s].sent = command->streams[s].total;
		stream_rest(&command->streams[s]);
	}
	if (!command->tree_alive && (command->told_gone || !command->told_alive))
		command_free(guest, index_of(guest, command));
}

void command_handle(struct guest *guest, struct frame *frame)
{
	if (frame->kind == KIND_EXEC) {
		exec_command(guest, frame);
		return;
	}
	struct command *command = command_find(guest, frame->command);
	if (command != NULL && command->forgotten && frame->kind != KIND_SIGNAL)
		command = NULL;
	if (command == NULL) {
		/* What the edge may rightly send before it knows of the end is no mistake. */
		if (frame->kind != KIND_FORGET && frame->kind != KIND_OUTPUT_ACK)
			connection_complain(guest, frame->command, "no command of this number is held");
		return;
	}
	switch (frame->kind) {
	case KIND_STDIN:
		on_stdin(guest, command, frame);
		break;
	case KIND_SIGNAL:
		on_signal(guest, command, frame);
		break;
	case KIND_RESIZE:
		on_resize(guest, command, frame);
		break;
	case KIND_OUTPUT_ACK:
		on_ack(guest, command, frame);
		break;
	case KIND_RESUME:
		on_resume(guest, command, frame);
		break;
	default:
		on_forget(guest, command);
		break;
	}
}

/* ---- what the keeper reports ---- */

static void tree_gone(struct command *command)
{
	command->tree_alive = false;
	command->answer_by_us = 0;
}

static void take_report(struct guest *guest, struct command *command, const struct report *report)
{
	switch (report->kind) {
	case REPORT_STARTED:
		command->started = true;
		command->pid = report->pid;
		command->pid_start = report->pid_start;
		break;
	case REPORT_FAILED:
		command->failed = true;
		command->fault = report->fault;
		for (unsigned s = 0; s < 2; s++)
			close_stream(guest, &command->streams[s]);
		command->input.over = true;
		sync_input(guest, command);
		tree_gone(command);
		break;
	case REPORT_ENDED:
		command->outcome = report->outcome;
		if (!report->tree_alive)
			tree_gone(command);
		begin_end(guest, command, now_us());
		break;
	case REPORT_SIGNALLED:
		command->answer_by_us = 0;
		break;
	}
}

static void read_reports(struct guest *guest, struct command *command)
{
	struct report report;
	while (command->channel >= 0) {
		ssize_t got = recv(command->channel, &report, sizeof report, MSG_DONTWAIT);
		if (got < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		bool whole = got == (ssize_t)sizeof report;
		if (!whole && (got < (ssize_t)offsetof(struct report, fault) || report.kind == REPORT_FAILED)) {
			loop_close(guest, &command->channel); /* it is exiting: its end is known when it is reaped */
			return;
		}
		/* A keeper reads files of the sandbox, so it is not believed in what would be memory of ours. */
		report.fault.what[sizeof report.fault.what - 1] = report.fault.text[sizeof report.fault.text - 1] = '\0';
		take_report(guest, command, &report);
	}
}

static void keeper_gone(struct guest *guest, struct command *command, int status)
{
	read_reports(guest, command);
	loop_close(guest, &command->channel);
	command->keeper_pid = 0;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && (command->ended || command->failed)) {
		tree_gone(command);
		return;
	}
	command->orphaned = true;
	command->answer_by_us = 0;
	guest->hunting = true;
	guest->hunt_at_us = 0;
}

void command_reaped(struct guest *guest, pid_t pid, int status, const struct rusage *usage)
{
	for (unsigned i = 0; i < guest->commands_max; i++) {
		struct command *command = guest->commands[i];
		if (command == NULL)
			continue;
		if (command->keeper_pid == pid) {
			if (!WIFSTOPPED(status))
				keeper_gone(guest, command, status);
			else
				(void)kill(pid, ++command->keeper_stops > KEEPER_STOPS_MAX ? SIGKILL : SIGCONT);
			return;
		}
		if (command->pid == pid && command->orphaned && !command->ended && !WIFSTOPPED(status)) {
			uint64_t now = now_us();
			outcome_set(&command->outcome, status, usage);
			command->outcome.duration_us = now - command->begun_us;
			begin_end(guest, command, now);
			return;
		}
	}
}

/* ---- orphans: what a killed keeper leaves behind comes to PID 1 ---- */

static bool is_orphan(void *context, pid_t pid)
{
	const struct guest *guest = context;
	for (unsigned i = 0; i < guest->commands_max; i++)
		if (guest->commands[i] != NULL && guest->commands[i]->keeper_pid == pid)
			return false;
	return true;
}

static void hunt(struct guest *guest, uint64_t now)
{
	struct rusage usage;
	int status;
	pid_t pid = 0;
	if (proctree_kill(guest->house.proc_fd, is_orphan, guest) != 0) {
		guest->hunt_at_us = now + HUNT_AGAIN_US;
		return;
	}
	for (int i = 0; i < REAPED_A_TURN_MAX && (pid = wait4(-1, &status, WNOHANG | WUNTRACED, &usage)) > 0; i++)
		command_reaped(guest, pid, status, &usage);
	if (pid > 0 || guest->hunt_at_us == 0) {
		guest->hunt_at_us = now; /* more to reap, or a keeper that died in this very moment */
		return;
	}
	guest->hunting = false;
	for (unsigned i = 0; i < guest->commands_max; i++) {
		struct command *command = guest->commands[i];
		if (command == NULL || !command->orphaned)
			continue;
		command->orphaned = false;
		tree_gone(command);
		if (command->ended || command->failed)
			continue;
		command->outcome = (struct outcome){.status = SIGKILL, .duration_us = now - command->begun_us};
		begin_end(guest, command, now);
	}
}

/* ---- the loop's calls ---- */

void command_event(struct guest *guest, unsigned index, enum source source)
{
	struct command *command = guest->commands[index];
	if (command == NULL)
		return;
	if (source == SOURCE_KEEPER) {
		read_reports(guest, command);
	} else if (source == SOURCE_STDIN) {
		if (command->input.fd >= 0)
			input_push(&command->input);
		sync_input(guest, command);
	} else {
		read_stream(guest, command, source == SOURCE_STDOUT ? 0 : 1);
		if (command->ended && !command->complete)
			settle(guest, command, now_us());
	}
}

void command_tick(struct guest *guest, uint64_t now)
{
	if (guest->hunting && now >= guest->hunt_at_us)
		hunt(guest, now);
	for (unsigned i = 0; i < guest->commands_max; i++) {
		struct command *command = guest->commands[i];
		if (command == NULL)
			continue;
		if (command->ended && !command->complete && now >= command->detach_at_us)
			settle(guest, command, now);
		if (command->answer_by_us != 0 && now >= command->answer_by_us) {
			command->answer_by_us = 0;
			if (command->keeper_pid > 0)
				(void)kill(command->keeper_pid, SIGKILL);
		}
		if (command->forgotten && !command->tree_alive && (command->told_gone || !command->told_alive))
			command_free(guest, i);
	}
}

uint64_t command_deadline(const struct guest *guest)
{
	uint64_t first = guest->hunting ? guest->hunt_at_us : UINT64_MAX;
	for (unsigned i = 0; i < guest->commands_max; i++) {
		const struct command *command = guest->commands[i];
		if (command == NULL)
			continue;
		/* A full window at its deadline waits for an acknowledgement, not for the clock. */
		bool waits = command->ended && !command->complete && command->detach_at_us + DETACH_AFTER_US > now_us();
		if (waits && command->detach_at_us < first)
			first = command->detach_at_us;
		if (command->answer_by_us != 0 && command->answer_by_us < first)
			first = command->answer_by_us;
	}
	return first;
}
