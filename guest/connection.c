/* Connections with the edge: accepting, cutting bytes into frames, HELLO, and the outbox. */
#include "guest.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#ifndef GUEST_BUILD
#define GUEST_BUILD "unknown"
#endif

#define PING_BYTES_MAX KIB
#define STOP_READING_BYTES (OUTBOX_BYTES + REPLIES_BYTES / 2) /* unsent */

static unsigned index_of(const struct guest *guest, const struct connection *connection)
{
	return (unsigned)(connection - guest->connections);
}

static void end(struct guest *guest, struct connection *connection)
{
	loop_close(guest, &connection->fd);
	free_pointer(&connection->in);
	connection->in_count = connection->in_need = 0;
	if (guest->active == connection) {
		guest->active = NULL;
		guest->out_at = guest->out_count = 0;
	}
}

static void watch_for(struct guest *guest, struct connection *connection)
{
	size_t unsent = guest->active == connection ? guest->out_count - guest->out_at : 0;
	uint32_t events = (unsent > 0 ? (uint32_t)EPOLLOUT : 0) | (unsent < STOP_READING_BYTES ? (uint32_t)EPOLLIN : 0);
	if (events != connection->events && loop_rewatch(guest, connection->fd, events, SOURCE_CONNECTION, index_of(guest, connection)))
		connection->events = events;
}

/* True when the outbox is empty afterwards. */
static bool flush(struct guest *guest)
{
	struct connection *connection = guest->active;
	while (guest->out_at < guest->out_count) {
		ssize_t sent = send(connection->fd, guest->outbox + guest->out_at, guest->out_count - guest->out_at,
				    MSG_NOSIGNAL | MSG_DONTWAIT);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0 && errno != EAGAIN) {
			end(guest, connection);
			return false;
		}
		if (sent < 0)
			break;
		guest->out_at += (size_t)sent;
	}
	if (guest->out_at == guest->out_count)
		guest->out_at = guest->out_count = 0;
	watch_for(guest, connection);
	return guest->out_count == 0;
}

struct builder connection_reply(struct guest *guest)
{
	return (struct builder){.bytes = guest->outbox, .size = sizeof guest->outbox, .at = guest->out_count};
}

void connection_replied(struct guest *guest, struct builder *builder)
{
	if (guest->active == NULL)
		return;
	if (build_end(builder))
		guest->out_count = builder->at;
	else
		end(guest, guest->active); /* it asks and asks and never reads */
}

void connection_complain(struct guest *guest, uint64_t command, const char *text)
{
	if (guest->active == NULL)
		return;
	struct builder builder = connection_reply(guest);
	build_begin(&builder, KIND_ERROR, command);
	build_text(&builder, TAG_TEXT, text);
	connection_replied(guest, &builder);
}

/* ERROR about the connection itself, then its end. */
static void refuse(struct guest *guest, struct connection *connection, const char *text)
{
	uint8_t bytes[256];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	if (guest->active == connection && !flush(guest)) {
		if (guest->active != NULL)
			end(guest, connection); /* half a frame lies in the socket: nothing may follow it */
		return;
	}
	build_begin(&builder, KIND_ERROR, 0);
	build_text(&builder, TAG_TEXT, text);
	if (build_end(&builder))
		(void)send(connection->fd, bytes, builder.at, MSG_NOSIGNAL | MSG_DONTWAIT);
	end(guest, connection);
}

static void hello(struct guest *guest, struct connection *connection, const struct frame *frame)
{
	uint64_t oldest = frame_number(frame, TAG_VERSION_MIN, UINT64_MAX);
	uint64_t newest = frame_number(frame, TAG_VERSION_MAX, 0);
	if (frame->kind != KIND_HELLO) {
		refuse(guest, connection, "the first frame must be HELLO");
		return;
	}
	if (oldest > PROTOCOL_VERSION || newest < PROTOCOL_VERSION) {
		refuse(guest, connection, "this guest speaks version 1 of the protocol and no other");
		return;
	}
	if (guest->active != NULL)
		end(guest, guest->active);
	guest->active = connection;
	guest->lists_due = guest->list_at = 0;
	report_detach(guest);
	struct builder builder = connection_reply(guest);
	build_begin(&builder, KIND_WELCOME, 0);
	build_number(&builder, TAG_VERSION, PROTOCOL_VERSION);
	build_text(&builder, TAG_BUILD, GUEST_BUILD);
	connection_replied(guest, &builder);
}

static void ping(struct guest *guest, struct connection *connection, const struct frame *frame)
{
	struct field data = {0};
	if (frame_find(frame, TAG_DATA, &data) && data.size > PING_BYTES_MAX) {
		refuse(guest, connection, "PING carries over 1 KiB");
		return;
	}
	struct builder builder = connection_reply(guest);
	build_begin(&builder, KIND_PONG, 0);
	build_bytes(&builder, TAG_DATA, data.data, data.size);
	connection_replied(guest, &builder);
}

static void handle(struct guest *guest, struct connection *connection, struct frame *frame)
{
	if (guest->active != connection) {
		hello(guest, connection, frame);
		return;
	}
	switch (frame->kind) {
	case KIND_LIST:
		guest->lists_due++;
		break;
	case KIND_PING:
		ping(guest, connection, frame);
		break;
	case KIND_EXEC:
	case KIND_STDIN:
	case KIND_SIGNAL:
	case KIND_RESIZE:
	case KIND_OUTPUT_ACK:
	case KIND_FORGET:
	case KIND_RESUME:
		if (frame->command == 0)
			refuse(guest, connection, "a frame about a command has no number of it");
		else
			command_handle(guest, frame);
		break;
	case KIND_HELLO:
		refuse(guest, connection, "HELLO came twice");
		break;
	default:
		refuse(guest, connection, "a frame of a kind that does not go to a guest");
		break;
	}
}

/* Handles every whole frame at the start of `bytes`; gives how many bytes they were. The connection may be gone afterwards. */
static size_t consume(struct guest *guest, struct connection *connection, uint8_t *bytes, size_t count)
{
	size_t done = 0;
	while (connection->fd >= 0) {
		struct frame frame;
		const char *why = NULL;
		switch (frame_parse(bytes + done, count - done, &frame, &connection->in_need, &why)) {
		case FRAME_WHOLE:
			handle(guest, connection, &frame);
			done += connection->in_need;
			break;
		case FRAME_PART:
			return done;
		case FRAME_BAD:
			refuse(guest, connection, why);
			return done;
		}
	}
	return done;
}

/* Keeps the beginning of a frame until the rest comes, in a buffer of exactly its size. */
static void keep_part(struct guest *guest, struct connection *connection, const uint8_t *part, size_t count)
{
	uint8_t *in = realloc(connection->in, connection->in_need + 1);
	if (in == NULL) {
		refuse(guest, connection, "no memory for a frame");
		return;
	}
	connection->in = in;
	if (part != NULL)
		memcpy(in, part, count);
	connection->in_count = count;
}

static void receive(struct guest *guest, struct connection *connection)
{
	bool in_part = connection->in != NULL;
	uint8_t *to = in_part ? connection->in + connection->in_count : guest->scratch;
	size_t room = in_part ? connection->in_need - connection->in_count : SCRATCH_BYTES;
	ssize_t got = recv(connection->fd, to, room, MSG_DONTWAIT);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got <= 0) {
		end(guest, connection);
		return;
	}
	uint8_t *bytes = in_part ? connection->in : guest->scratch;
	size_t count = in_part ? connection->in_count + (size_t)got : (size_t)got;
	if (in_part && count < connection->in_need) {
		connection->in_count = count;
		return;
	}
	size_t done = consume(guest, connection, bytes, count);
	if (connection->fd < 0)
		return;
	if (done == count)
		free_pointer(&connection->in);
	else
		keep_part(guest, connection, in_part ? NULL : bytes + done, count - done);
}

void connection_event(struct guest *guest, unsigned index, uint32_t events)
{
	struct connection *connection = &guest->connections[index];
	if (connection->fd < 0)
		return;
	if ((connection->events & EPOLLIN) != 0)
		receive(guest, connection);
	else if ((events & (EPOLLHUP | EPOLLERR)) != 0)
		end(guest, connection);
}

void connection_accept(struct guest *guest)
{
	cleanup_fd int fd = accept4(guest->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0)
		return;
	struct connection *place = NULL;
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
		struct connection *other = &guest->connections[i];
		if (other == guest->active)
			continue;
		if (place == NULL || other->fd < 0 || (place->fd >= 0 && other->age < place->age))
			place = other;
	}
	if (place->fd >= 0)
		end(guest, place); /* one that never said HELLO makes room */
	if (!loop_watch(guest, fd, EPOLLIN, SOURCE_CONNECTION, index_of(guest, place)))
		return;
	place->events = EPOLLIN;
	place->age = ++guest->accepted;
	place->fd = steal_fd(&fd);
}

void connection_pump(struct guest *guest)
{
	while (guest->active != NULL && flush(guest)) {
		struct builder builder = {.bytes = guest->outbox, .size = OUTBOX_BYTES};
		if (!report_fill(guest, &builder))
			return;
		guest->out_count = builder.at;
	}
}
