/* What commands have to tell, made into frames from their state and never queued: a slow edge costs no memory. */
#include "guest.h"

#include <string.h>
#include <sys/wait.h>

#define FRAME_ROOM_BYTES 512u /* more than any frame without DATA */
#define OUTPUT_HEAD_BYTES (FRAME_HEADER_BYTES + 3 * FIELD_HEADER_BYTES + 16u)
#define OUTPUT_WORTH_BYTES (4u * KIB) /* of room, to send a part of what waits */

void report_detach(struct guest *guest)
{
	for (unsigned i = 0; i < COMMANDS_MAX; i++) {
		struct command *command = guest->commands[i];
		if (command == NULL)
			continue;
		for (unsigned s = 0; s < 2; s++) {
			command->streams[s].resumed = false;
			command->streams[s].sent = command->streams[s].acked;
		}
		command->told_started = command->told_result = command->told_alive = command->told_gone = false;
	}
}

static bool fits(const struct builder *builder)
{
	return builder->size - builder->at >= FRAME_ROOM_BYTES;
}

static void tell_started(struct command *command, struct builder *builder)
{
	build_begin(builder, KIND_STARTED, command->id);
	build_number(builder, TAG_PID, (uint64_t)command->pid);
	build_number(builder, TAG_PID_START, command->pid_start);
	command->told_started = build_end(builder);
}

static void tell_not_started(struct command *command, struct builder *builder)
{
	build_begin(builder, KIND_NOT_STARTED, command->id);
	build_number(builder, TAG_ERRNO, (uint64_t)command->fault.error);
	build_text(builder, TAG_WHAT, command->fault.what);
	build_text(builder, TAG_TEXT, command->fault.text);
	command->told_result = build_end(builder);
}

static void tell_exited(struct command *command, struct builder *builder)
{
	int status = command->outcome.status;
	build_begin(builder, KIND_EXITED, command->id);
	if (WIFSIGNALED(status))
		build_number(builder, TAG_SIGNAL, (uint64_t)WTERMSIG(status));
	else
		build_number(builder, TAG_EXIT_CODE, (uint64_t)WEXITSTATUS(status));
	build_number(builder, TAG_CPU_US, command->outcome.cpu_us);
	build_number(builder, TAG_PEAK_BYTES, command->outcome.peak_bytes);
	build_number(builder, TAG_DURATION_US, command->outcome.duration_us);
	build_number(builder, TAG_STDOUT_TOTAL, command->streams[0].total);
	build_number(builder, TAG_STDERR_TOTAL, command->streams[1].total);
	build_number(builder, TAG_DETACHED, command->detached);
	build_number(builder, TAG_TREE_ALIVE, command->tree_alive);
	command->told_result = build_end(builder);
	command->told_alive = command->tree_alive;
}

static void tell_stdin(struct command *command, struct builder *builder)
{
	build_begin(builder, KIND_STDIN_ACK, command->id);
	build_number(builder, TAG_OFFSET, command->input.taken);
	if (command->input.lost)
		build_number(builder, TAG_EOF, 1);
	command->input.ack_due = !build_end(builder);
}

/* False when the room is too small for what waits. */
static bool tell_output(struct command *command, unsigned which, struct builder *builder)
{
	struct stream *stream = &command->streams[which];
	while (stream->resumed && stream->sent < stream->total) {
		size_t room = builder->size - builder->at;
		size_t size = (size_t)(stream->total - stream->sent);
		if (room < OUTPUT_HEAD_BYTES + (size < OUTPUT_WORTH_BYTES ? size : OUTPUT_WORTH_BYTES))
			return false;
		if (size > OUTPUT_DATA_BYTES_MAX)
			size = OUTPUT_DATA_BYTES_MAX;
		if (size > room - OUTPUT_HEAD_BYTES)
			size = room - OUTPUT_HEAD_BYTES;
		build_begin(builder, KIND_OUTPUT, command->id);
		build_number(builder, TAG_STREAM, which + 1);
		build_number(builder, TAG_OFFSET, stream->sent);
		uint8_t *data = build_room(builder, TAG_DATA, size);
		if (data != NULL)
			stream_copy(stream, stream->sent, size, data);
		if (!build_end(builder))
			return false;
		stream->sent += size;
	}
	return true;
}

static bool all_told(const struct command *command)
{
	const struct stream *out = &command->streams[0], *err = &command->streams[1];
	return out->resumed && out->sent == out->total && (command->terminal || (err->resumed && err->sent == err->total));
}

/* Everything that one command has to tell now; false when the room ran out. */
static bool tell(struct command *command, struct builder *builder)
{
	bool heard = command->streams[0].resumed || command->streams[1].resumed;
	if (!heard && !command->forgotten)
		return true;
	if (!fits(builder))
		return false;
	if (!command->forgotten) {
		if (command->failed && !command->told_result && all_told(command))
			tell_not_started(command, builder);
		if ((command->started || command->complete) && !command->told_started)
			tell_started(command, builder);
		if (!command->told_started)
			return true; /* its keeper has not said so yet: nothing comes before it */
		if (!tell_output(command, 0, builder) || !tell_output(command, 1, builder) || !fits(builder))
			return false;
		if (command->input.ack_due)
			tell_stdin(command, builder);
		if (command->complete && !command->told_result && all_told(command)) {
			if (!fits(builder))
				return false;
			tell_exited(command, builder);
		}
	}
	if (command->told_alive && !command->tree_alive && !command->told_gone) {
		if (!fits(builder))
			return false;
		build_begin(builder, KIND_TREE_GONE, command->id);
		command->told_gone = build_end(builder);
	}
	return true;
}

static void tell_state(const struct command *command, struct builder *builder)
{
	build_begin(builder, KIND_STATE, command->id);
	build_number(builder, TAG_RUNNING, !command->ended && !command->failed);
	build_number(builder, TAG_PID, (uint64_t)command->pid);
	build_number(builder, TAG_PID_START, command->pid_start);
	build_number(builder, TAG_STDIN_TAKEN, command->input.taken);
	build_number(builder, TAG_STDOUT_ACKED, command->streams[0].acked);
	build_number(builder, TAG_STDERR_ACKED, command->streams[1].acked);
	build_number(builder, TAG_STDOUT_TOTAL, command->streams[0].total);
	build_number(builder, TAG_STDERR_TOTAL, command->streams[1].total);
	build_number(builder, TAG_TREE_ALIVE, command->tree_alive);
	(void)build_end(builder);
}

static bool tell_list(struct guest *guest, struct builder *builder)
{
	while (guest->lists_due > 0) {
		for (; guest->list_at < COMMANDS_MAX; guest->list_at++) {
			const struct command *command = guest->commands[guest->list_at];
			if (!fits(builder))
				return false;
			if (command != NULL && !command->forgotten)
				tell_state(command, builder);
		}
		if (!fits(builder))
			return false;
		build_begin(builder, KIND_LISTED, 0);
		(void)build_end(builder);
		guest->list_at = 0;
		guest->lists_due--;
	}
	return true;
}

bool report_fill(struct guest *guest, struct builder *builder)
{
	unsigned first = guest->turn;
	if (!tell_list(guest, builder))
		return true;
	for (unsigned i = 0; i < COMMANDS_MAX; i++) {
		unsigned index = (first + i) % COMMANDS_MAX;
		struct command *command = guest->commands[index];
		if (command == NULL)
			continue;
		if (!tell(command, builder)) {
			guest->turn = (index + 1) % COMMANDS_MAX; /* the rest waits for its next turn: others come first */
			return true;
		}
	}
	return builder->at > 0;
}
