#include "stream.h"

#include "util.h"

#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>

/* Makes the ring so large that `held` bytes fit. A byte's place is its offset modulo the size, so every byte moves. */
static bool grow(struct stream *stream, size_t held)
{
	uint32_t size = stream->size == 0 ? WINDOW_START_BYTES : stream->size;
	while (size < held)
		size *= 2;
	uint8_t *ring = malloc(size);
	if (ring == NULL)
		return false;
	size_t have = (size_t)(stream->total - stream->acked);
	size_t begin = (size_t)(stream->acked & (size - 1));
	size_t first = have < size - begin ? have : size - begin;
	stream_copy(stream, stream->acked, first, ring + begin);
	stream_copy(stream, stream->acked + first, have - first, ring);
	free(stream->ring);
	stream->ring = ring;
	stream->size = size;
	return true;
}

static void put(struct stream *stream, const uint8_t *from, size_t size)
{
	size_t begin = (size_t)(stream->total & (stream->size - 1));
	size_t first = size < stream->size - begin ? size : stream->size - begin;
	memcpy(stream->ring + begin, from, first);
	if (size > first)
		memcpy(stream->ring, from + first, size - first);
}

/* Where the next bytes of the window go: up to two pieces of the ring. */
static int free_parts(const struct stream *stream, size_t held, struct iovec parts[2])
{
	size_t begin = (size_t)(stream->total & (stream->size - 1));
	size_t room = stream->size - held;
	size_t first = room < stream->size - begin ? room : stream->size - begin;
	parts[0] = (struct iovec){.iov_base = stream->ring + begin, .iov_len = first};
	parts[1] = (struct iovec){.iov_base = stream->ring, .iov_len = room - first};
	return room > first ? 2 : 1;
}

enum stream_state stream_read(struct stream *stream, uint8_t *scratch, size_t scratch_size)
{
	size_t held = (size_t)(stream->total - stream->acked);
	struct iovec parts[2] = {{.iov_base = scratch, .iov_len = scratch_size}};
	bool to_ring = !stream->dropping && stream->ring != NULL;
	int count = 1;
	if (!stream->dropping && held == WINDOW_BYTES)
		return STREAM_FULL;
	if (to_ring) {
		if (held == stream->size && !grow(stream, held + 1))
			return STREAM_DRY;
		count = free_parts(stream, held, parts);
	}
	ssize_t got = readv(stream->fd, parts, count);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return STREAM_DRY;
	if (got <= 0)
		return STREAM_ENDED; /* EOF; EIO from a terminal whose other side is gone */
	if (stream->dropping)
		return STREAM_MORE;
	if (!to_ring) { /* most commands write little or nothing: memory is taken once it is known how much */
		if (!grow(stream, (size_t)got))
			return STREAM_ENDED;
		put(stream, scratch, (size_t)got);
	}
	stream->total += (uint64_t)got;
	return STREAM_MORE;
}

void stream_copy(const struct stream *stream, uint64_t offset, size_t size, uint8_t *to)
{
	if (size == 0)
		return;
	size_t begin = (size_t)(offset & (stream->size - 1));
	size_t first = size < stream->size - begin ? size : stream->size - begin;
	memcpy(to, stream->ring + begin, first);
	if (size > first)
		memcpy(to + first, stream->ring, size - first);
}

void stream_free(struct stream *stream)
{
	close_fd(&stream->fd);
	free_pointer(&stream->ring);
	stream->size = 0;
}

void stream_rest(struct stream *stream)
{
	if (stream->acked == stream->total) {
		free_pointer(&stream->ring);
		stream->size = 0;
	}
}

void stream_settle(struct stream *stream)
{
	int waiting = 0;
	if (stream->fd < 0 || ioctl(stream->fd, FIONREAD, &waiting) != 0 || waiting < 0)
		waiting = 0;
	stream->settled = stream->total + (uint64_t)waiting;
}

/* Writes as much as the command takes now; false when its reader is gone. */
static bool give(struct input *input, const uint8_t **data, size_t *size)
{
	while (*size > 0) {
		ssize_t put = write(input->fd, *data, *size);
		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0 && errno == EAGAIN)
			return true;
		input->ack_due = true;
		if (put <= 0) {
			input->over = input->lost = true;
			return false;
		}
		*data += put;
		*size -= (size_t)put;
		input->taken += (uint64_t)put;
	}
	return true;
}

/* A pipe ends by closing; a terminal has no end to close: its line discipline makes one of ^D. */
static void finish(struct input *input)
{
	static const uint8_t end_of_file = 4;
	if (!input->terminal || write(input->fd, &end_of_file, 1) == 1 || errno != EAGAIN)
		input->over = true;
}

static const char *refuse(struct input *input, const char *reason)
{
	input->over = input->lost = input->ack_due = true;
	return reason;
}

static const char *hold(struct input *input, const uint8_t *data, size_t size)
{
	if (input->bytes == NULL && (input->bytes = malloc(STDIN_BYTES)) == NULL)
		return refuse(input, "no memory for stdin");
	if (input->at > 0) {
		memmove(input->bytes, input->bytes + input->at, input->count);
		input->at = 0;
	}
	memcpy(input->bytes + input->count, data, size);
	input->count += size;
	return NULL;
}

const char *input_offer(struct input *input, uint64_t offset, const uint8_t *data, size_t size, bool eof)
{
	uint64_t have = input->taken + input->count;
	if (offset > have)
		return refuse(input, "a gap in stdin");
	uint64_t known = have - offset < size ? have - offset : size;
	if (known > 0) {
		data += known;
		size -= (size_t)known;
	}
	if (input->eof && size > 0)
		return refuse(input, "bytes past the end of stdin");
	if (size > STDIN_BYTES - input->count)
		return refuse(input, "stdin runs more than 64 KiB ahead of what was taken");
	input->eof = input->eof || eof;
	if (input->count == 0 && !give(input, &data, &size))
		return NULL;
	if (size > 0)
		return hold(input, data, size);
	if (input->count == 0 && input->eof)
		finish(input);
	return NULL;
}

void input_push(struct input *input)
{
	const uint8_t *data = input->count > 0 ? input->bytes + input->at : NULL;
	size_t size = input->count;
	if (!give(input, &data, &size))
		return;
	input->at += input->count - size;
	input->count = size;
	if (size > 0)
		return;
	free_pointer(&input->bytes);
	input->at = 0;
	if (input->eof)
		finish(input);
}

bool input_waits(const struct input *input)
{
	return input->count > 0 || (input->terminal && input->eof);
}

void input_free(struct input *input)
{
	close_fd(&input->fd);
	free_pointer(&input->bytes);
	input->at = input->count = 0;
	input->watched = false;
}
