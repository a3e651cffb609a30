/* Fuzzing of PID 1 itself: connections, the table of commands, output windows, stdin and the end of keepers, by inputs that are
 * little programs. Every byte that the guest sends must be a whole frame, and every byte of output the one that the command wrote at
 * that offset; nothing may grow past its bound, and in the end no descriptor and no memory may be left.
 *
 * An input is a row of actions: a byte that says which, then what it takes (see `act`). Keepers are as hostile here as the edge: either
 * may say anything at any time. */
#include "tape.h"
#include "world.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#define CLIENTS_MAX 6u
#define HEARD_BYTES_MAX (256u * KIB)
#define ACTIONS_MAX 400u
#define TURNS_AT_END 8u
#define IDS 4u
#define DESCRIPTORS_SEEN 256u
#define STDIN_PIECE_BYTES_MAX 70000u

struct client {
	int fd;
	size_t heard_count;
	uint8_t heard[HEARD_BYTES_MAX];
	unsigned frames;
};

static struct guest guest;
static struct client clients[CLIENTS_MAX];

/* ---- the edge's side ---- */

static void check_output(const struct frame *frame)
{
	struct field data = {0};
	uint64_t stream = frame_number(frame, TAG_STREAM, 0), offset = frame_number(frame, TAG_OFFSET, UINT64_MAX);
	must(stream == 1 || stream == 2);
	must(frame_find(frame, TAG_DATA, &data) && data.size > 0 && data.size <= OUTPUT_DATA_BYTES_MAX);
	for (uint32_t i = 0; i < data.size; i++)
		must(data.data[i] == pattern((unsigned)stream - 1, offset + i));
}

static void check_frame(struct client *client, const struct frame *frame)
{
	bool first = client->frames++ == 0;
	must(frame->kind >= KIND_WELCOME && frame->kind <= KIND_ERROR);
	must(!first || frame->kind == KIND_WELCOME || frame->kind == KIND_ERROR);
	must((frame->kind == KIND_WELCOME) <= first);
	if (frame->kind == KIND_OUTPUT)
		check_output(frame);
	struct field text;
	must(!frame_find(frame, TAG_TEXT, &text) || text.size < sizeof((struct fault *)0)->text);
	must(!frame_find(frame, TAG_WHAT, &text) || text.size < sizeof((struct fault *)0)->what);
}

static void client_reads(struct client *client, size_t wanted)
{
	struct frame frame;
	const char *why = NULL;
	size_t at = 0, need = 0;
	size_t room = sizeof client->heard - client->heard_count;
	if (client->fd < 0)
		return;
	ssize_t got = recv(client->fd, client->heard + client->heard_count, wanted < room ? wanted : room, MSG_DONTWAIT);
	if (got <= 0)
		return;
	client->heard_count += (size_t)got;
	for (;;) {
		enum frame_status status = frame_parse(client->heard + at, client->heard_count - at, &frame, &need, &why);
		must(status != FRAME_BAD);
		if (status == FRAME_PART)
			break;
		check_frame(client, &frame);
		at += need;
	}
	memmove(client->heard, client->heard + at, client->heard_count - at);
	client->heard_count -= at;
}

static void client_sends(const struct client *client, const uint8_t *data, size_t size)
{
	if (client->fd >= 0)
		(void)!send(client->fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void connect_client(struct client *client)
{
	close_fd(&client->fd);
	client->heard_count = client->frames = 0;
	client->fd = world_knock();
	connection_accept(&guest);
}

static void say_hello(const struct client *client)
{
	uint8_t bytes[64];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	build_begin(&builder, KIND_HELLO, 0);
	build_number(&builder, TAG_VERSION_MIN, PROTOCOL_VERSION);
	build_number(&builder, TAG_VERSION_MAX, PROTOCOL_VERSION);
	must(build_end(&builder));
	client_sends(client, bytes, builder.at);
}

static void add_field(struct builder *builder, enum tag tag, struct tape *tape)
{
	bool is_bytes = (tag >= TAG_BUILD && tag <= TAG_USER) || tag == TAG_DATA || tag > TAG_TREE_ALIVE;
	if (is_bytes) {
		struct tape part = take_part(tape, take_byte(tape));
		build_bytes(builder, tag, part.data, part.size);
	} else {
		build_number(builder, tag, take_number(tape));
	}
}

/* A frame that can be taken apart: of any kind, with the fields that are its own or with any. */
static void send_frame(const struct client *client, struct tape *tape)
{
	static const enum tag own[][3] = {
		[KIND_STDIN] = {TAG_OFFSET, TAG_DATA, TAG_EOF},
		[KIND_SIGNAL] = {TAG_SIGNAL},
		[KIND_RESIZE] = {TAG_ROWS, TAG_COLS},
		[KIND_OUTPUT_ACK] = {TAG_STREAM, TAG_OFFSET},
		[KIND_RESUME] = {TAG_STREAM, TAG_OFFSET},
		[KIND_PING] = {TAG_DATA},
		[KIND_PING + 1] = {0},
	};
	uint8_t bytes[2048];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	uint8_t kind = take_byte(tape) % ARRAY_SIZE(own), first = take_byte(tape);
	build_begin(&builder, (enum kind)kind, first % IDS);
	for (unsigned i = 0; i < ARRAY_SIZE(own[0]) && own[kind][i] != 0; i++)
		add_field(&builder, own[kind][i], tape);
	if (first >= 128)
		for (unsigned count = take_byte(tape) % 8; count > 0; count--)
			add_field(&builder, (enum tag)(take_byte(tape) % 40), tape);
	if (build_end(&builder))
		client_sends(client, bytes, builder.at);
}

static void send_stdin(const struct client *client, uint64_t id, uint64_t offset, size_t size)
{
	static uint8_t bytes[STDIN_PIECE_BYTES_MAX + 64];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	build_begin(&builder, KIND_STDIN, id);
	build_number(&builder, TAG_OFFSET, offset);
	(void)build_room(&builder, TAG_DATA, size);
	must(build_end(&builder));
	client_sends(client, bytes, builder.at);
}

static void send_exec(const struct client *client, uint64_t id, unsigned options)
{
	uint8_t bytes[128];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	build_begin(&builder, KIND_EXEC, id);
	build_text(&builder, TAG_SHELL, "true");
	build_number(&builder, TAG_OPTIONS, options);
	must(build_end(&builder));
	client_sends(client, bytes, builder.at);
}

/* ---- the keepers' side ---- */

static void send_report(struct worker *worker, struct tape *tape)
{
	struct report report;
	memset(&report, 0xa5, sizeof report);
	report.kind = (enum report_kind)(take_byte(tape) % 5);
	report.pid = (pid_t)take_number(tape);
	report.pid_start = take_number(tape);
	report.outcome = (struct outcome){.status = (int)take_number(tape)};
	uint8_t how = take_byte(tape);
	report.tree_alive = (how & 1) != 0;
	size_t size = offsetof(struct report, fault);
	if ((how & 2) != 0) {
		size = sizeof report;
		report.fault.error = (int)take_number(tape);
	}
	if (how >= 250)
		size = take_byte(tape) % (sizeof report + 1);
	if (worker->channel >= 0)
		(void)!send(worker->channel, &report, size, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* ---- the whole ---- */

static void check_stream(const struct stream *stream)
{
	must(stream->acked <= stream->total && stream->sent >= stream->acked && stream->sent <= stream->total);
	must(stream->total - stream->acked <= WINDOW_BYTES && stream->size <= WINDOW_BYTES);
	must(stream->ring == NULL || stream->total - stream->acked <= stream->size);
}

/* A stream whose command could still write is read until the command has ended. */
static void check_open(const struct command *command)
{
	const struct worker *worker = worker_of(command->keeper_pid);
	for (unsigned s = 0; worker != NULL && s < STREAMS; s++)
		must(worker->out[s] < 0 || command->streams[s].fd >= 0 || command->failed || command->complete);
}

static void check(void)
{
	must(guest.out_at <= guest.out_count && guest.out_count <= sizeof guest.outbox);
	must(guest.active == NULL || guest.active->fd >= 0);
	for (unsigned i = 0; i < COMMANDS_MAX; i++) {
		const struct command *command = guest.commands[i];
		if (command == NULL)
			continue;
		must(command->id != 0 && command_find(&guest, command->id) == command);
		must(command->input.count <= STDIN_BYTES);
		for (unsigned s = 0; s < STREAMS; s++)
			check_stream(&command->streams[s]);
		check_open(command);
	}
}

static void act(uint8_t action, struct tape *tape)
{
	uint8_t which = take_byte(tape);
	struct client *client = &clients[which % CLIENTS_MAX];
	struct worker *worker = &world.workers[which % WORKERS_MAX];
	uint8_t scratch[4096];
	const struct command *known;
	struct tape part;
	uint64_t id;
	switch (action % 16) {
	case 0:
		part = take_part(tape, take_number(tape) % 70000);
		client_sends(client, part.data, part.size);
		break;
	case 1:
		connect_client(client);
		break;
	case 2:
		say_hello(client);
		break;
	case 3:
		send_frame(client, tape);
		break;
	case 4:
		send_exec(client, take_byte(tape) % IDS, take_byte(tape) % 4);
		break;
	case 5:
		client_reads(client, take_number(tape));
		break;
	case 6:
		close_fd(&client->fd);
		break;
	case 7:
		send_report(worker, tape);
		break;
	case 8:
		worker_writes(worker, which >> 7, take_number(tape) % 300000);
		break;
	case 9:
		close_fd(&worker->out[which >> 7]);
		break;
	case 10:
		if (worker->in >= 0)
			(void)!read(worker->in, scratch, take_number(tape) % sizeof scratch);
		break;
	case 11:
		close_fd(&worker->in);
		break;
	case 12:
		worker_changes(which % WORKERS_MAX, which < 128 ? take_byte(tape) : 19 << 8 | 0x7f);
		break;
	case 13:
		world.now_us += take_number(tape) % 5000 * 1000;
		break;
	case 14:
		world.failures = which % 3;
		world.orphans = which >> 6;
		break;
	default:
		id = take_byte(tape) % IDS;
		known = command_find(&guest, id);
		send_stdin(client, id, known == NULL ? 0 : known->input.taken + known->input.count,
			   take_number(tape) % STDIN_PIECE_BYTES_MAX);
		break;
	}
	loop_turn(&guest);
	check();
}

static void open_guest(void)
{
	(void)signal(SIGPIPE, SIG_IGN); /* as in PID 1, which blocks them all */
	memset(&guest, 0, sizeof guest);
	guest.self = 1;
	guest.commands_max = COMMANDS_MAX;
	guest.listen_fd = -1;
	guest.house = (struct house){.proc_fd = -1, .own_uid = 65533, .changes_user = true};
	guest.house.null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	guest.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	guest.signal_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	must(guest.house.null_fd >= 0 && guest.epoll_fd >= 0 && guest.signal_fd >= 0);
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
		guest.connections[i].fd = -1;
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		clients[i].fd = -1;
	world_open(&guest);
}

static void close_guest(void)
{
	world.failures = 0;
	for (unsigned i = 0; i < CLIENTS_MAX; i++)
		close_fd(&clients[i].fd);
	for (unsigned i = 0; i < TURNS_AT_END; i++)
		loop_turn(&guest);
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
		must(guest.connections[i].fd < 0 && guest.connections[i].in == NULL);
	for (unsigned i = 0; i < COMMANDS_MAX; i++)
		if (guest.commands[i] != NULL)
			command_free(&guest, i);
	close_fd(&guest.house.null_fd);
	close_fd(&guest.epoll_fd);
	close_fd(&guest.signal_fd);
	world_close();
}

static unsigned open_descriptors(void)
{
	struct pollfd all[DESCRIPTORS_SEEN];
	unsigned count = 0;
	for (int fd = 0; fd < (int)ARRAY_SIZE(all); fd++)
		all[fd] = (struct pollfd){.fd = fd};
	must(poll(all, ARRAY_SIZE(all), 0) >= 0);
	for (unsigned i = 0; i < ARRAY_SIZE(all); i++)
		count += (all[i].revents & POLLNVAL) == 0;
	return count;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct tape tape = {.data = data, .size = size};
	unsigned before = open_descriptors();
	open_guest();
	connect_client(&clients[0]);
	say_hello(&clients[0]);
	loop_turn(&guest);
	for (unsigned i = 0; i < ACTIONS_MAX && tape.size > 0; i++)
		act(take_byte(&tape), &tape);
	close_guest();
	must(open_descriptors() == before);
	return 0;
}
