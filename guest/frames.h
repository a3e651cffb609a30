/* The bytes of docs/guest-protocol.md: parsing in place and building into a given buffer. Allocates nothing, knows no descriptor. */
#ifndef GUEST_FRAMES_H
#define GUEST_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROTOCOL_VERSION 1u
#define FRAME_HEADER_BYTES 16u
#define FIELD_HEADER_BYTES 6u
#define FRAME_BODY_BYTES_MAX ((2048u + 512u) * 1024u)

enum kind {
	KIND_HELLO = 1,
	KIND_EXEC = 2,
	KIND_STDIN = 3,
	KIND_SIGNAL = 4,
	KIND_RESIZE = 5,
	KIND_OUTPUT_ACK = 6,
	KIND_FORGET = 7,
	KIND_LIST = 8,
	KIND_RESUME = 9,
	KIND_PING = 10,
	KIND_WELCOME = 64,
	KIND_STARTED = 65,
	KIND_OUTPUT = 66,
	KIND_STDIN_ACK = 67,
	KIND_EXITED = 68,
	KIND_TREE_GONE = 69,
	KIND_NOT_STARTED = 70,
	KIND_STATE = 71,
	KIND_LISTED = 72,
	KIND_PONG = 73,
	KIND_ERROR = 74,
};

enum tag {
	TAG_VERSION_MIN = 1,
	TAG_VERSION_MAX = 2,
	TAG_VERSION = 3,
	TAG_BUILD = 4,
	TAG_ARG = 5,
	TAG_SHELL = 6,
	TAG_ENV = 7,
	TAG_CWD = 8,
	TAG_USER = 9,
	TAG_OPTIONS = 10,
	TAG_ROWS = 11,
	TAG_COLS = 12,
	TAG_DATA = 13,
	TAG_OFFSET = 14,
	TAG_EOF = 15,
	TAG_SIGNAL = 16,
	TAG_STREAM = 17,
	TAG_PID = 18,
	TAG_PID_START = 19,
	TAG_EXIT_CODE = 20,
	TAG_CPU_US = 21,
	TAG_PEAK_BYTES = 22,
	TAG_DURATION_US = 23,
	TAG_STDOUT_TOTAL = 24,
	TAG_STDERR_TOTAL = 25,
	TAG_DETACHED = 26,
	TAG_ERRNO = 27,
	TAG_WHAT = 28,
	TAG_TEXT = 29,
	TAG_RUNNING = 30,
	TAG_STDIN_TAKEN = 31,
	TAG_STDOUT_ACKED = 32,
	TAG_STDERR_ACKED = 33,
	TAG_TREE_ALIVE = 34,
	TAG_OPEN_FILES = 35,
};

#define OPTION_PTY 1u
#define OPTION_STDIN 2u

/* One whole frame; `body` points into the bytes that were parsed. */
struct frame {
	uint16_t kind;
	uint64_t command;
	uint8_t *body;
	uint32_t size;
};

struct field {
	uint16_t tag;
	uint32_t size;
	uint8_t *data;
};

enum frame_status { FRAME_WHOLE, FRAME_PART, FRAME_BAD };

/* Looks at the start of `bytes`. FRAME_PART: `*need` says how many bytes are wanted before it is worth to ask again.
 * FRAME_WHOLE: `*need` bytes belong to it, and every field fits and has the size of its type. FRAME_BAD: `*why`. */
enum frame_status frame_parse(uint8_t *bytes, size_t count, struct frame *frame, size_t *need, const char **why);

/* The next field of a frame that frame_parse called whole; `*at` starts at 0. */
bool frame_next(const struct frame *frame, size_t *at, struct field *field);
bool frame_find(const struct frame *frame, enum tag tag, struct field *field);
uint64_t frame_number(const struct frame *frame, enum tag tag, uint64_t absent);

/* Bytes on their way out. A frame that does not fit sets `failed` and leaves the buffer as it was before its begin. */
struct builder {
	uint8_t *bytes;
	size_t size, at, start;
	bool failed;
};

void build_begin(struct builder *builder, enum kind kind, uint64_t command);
void build_number(struct builder *builder, enum tag tag, uint64_t value);
void build_bytes(struct builder *builder, enum tag tag, const void *data, size_t size);
void build_text(struct builder *builder, enum tag tag, const char *text);
/* Room for `size` bytes of a field that the caller fills; NULL when they do not fit. */
uint8_t *build_room(struct builder *builder, enum tag tag, size_t size);
bool build_end(struct builder *builder);

#endif
