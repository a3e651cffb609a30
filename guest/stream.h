/* Bytes of one command on their way: an output window per stream, and what waits to enter its stdin.
 * Nothing here knows of frames, connections or epoll; the owner closes descriptors, after it stopped watching them. */
#ifndef GUEST_STREAM_H
#define GUEST_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WINDOW_BYTES (128u * 1024u)	/* of a stream, held until they are acknowledged */
#define WINDOW_START_BYTES (4u * 1024u) /* a window begins so small and doubles when it fills */
#define STDIN_BYTES (64u * 1024u)	/* that may wait to enter a command's stdin */

/* Offsets count all bytes of the stream: forgotten below `acked`, read from the command below `total`. */
struct stream {
	int fd; /* -1 once it has ended */
	bool watched, resumed;
	bool dropping;	 /* the result is out: what still comes is read and thrown away */
	uint64_t settled; /* after the command's end: `total` must reach this before the stream may be cut */
	uint64_t acked, sent, total;
	uint8_t *ring;
	uint32_t size;
};

enum stream_state { STREAM_MORE, STREAM_DRY, STREAM_FULL, STREAM_ENDED };

/* One read from the command. MORE: ask again; DRY: nothing now; FULL: not before an acknowledgement; ENDED: closed. */
enum stream_state stream_read(struct stream *stream, uint8_t *scratch, size_t scratch_size);
void stream_copy(const struct stream *stream, uint64_t offset, size_t size, uint8_t *to);
void stream_free(struct stream *stream);
/* Gives memory back when nothing waits in it. */
void stream_rest(struct stream *stream);
/* Notes how much lies in the pipe at this moment: it belongs to the command whatever else holds the pipe. */
void stream_settle(struct stream *stream);

struct input {
	int fd; /* -1 when closed */
	bool terminal, watched, ack_due;
	bool eof;  /* nothing comes after what waits */
	bool over; /* nothing more can be written: to be closed */
	bool lost; /* and that because the reader is gone or the edge broke the rules */
	uint64_t taken;
	uint8_t *bytes;
	size_t at, count;
};

/* Takes bytes at an offset of all stdin; gives NULL, or why they cannot be right (the input is then over). */
const char *input_offer(struct input *input, uint64_t offset, const uint8_t *data, size_t size, bool eof);
/* Moves on what waits. */
void input_push(struct input *input);
bool input_waits(const struct input *input);
void input_free(struct input *input);

#endif
