/* The golden frames, read by the C side: each argument is a file of tests/golden/frames. */
#include "frames.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_BYTES_MAX 4096
#define WIRE_BYTES_MAX 2048

struct golden {
	uint8_t wire[WIRE_BYTES_MAX + 1], built[WIRE_BYTES_MAX];
	size_t size;
	struct builder builder;
	bool bad, read_only;
};

static size_t from_hex(const char *text, uint8_t *bytes, size_t size_max)
{
	size_t size = 0;
	unsigned value;
	if (strcmp(text, "-") == 0)
		return 0;
	while (size < size_max && sscanf(text + 2 * size, "%2x", &value) == 1)
		bytes[size++] = (uint8_t)value;
	return size;
}

/* A frame in words becomes a frame by the builder while its lines are read. */
static bool read_line(struct golden *golden, const char *line)
{
	char name[32], value[LINE_BYTES_MAX];
	uint8_t bytes[WIRE_BYTES_MAX];
	unsigned long long number, about;
	if (line[0] == '#')
		return true;
	if (strncmp(line, "bad", 3) == 0)
		return golden->bad = true;
	if (strncmp(line, "read-only", 9) == 0)
		return golden->read_only = true;
	if (sscanf(line, "frame %31s %llu %llu", name, &number, &about) == 3) {
		build_begin(&golden->builder, (enum kind)number, about);
		return true;
	}
	if (sscanf(line, "number %31s %llu %llu", name, &number, &about) == 3) {
		build_number(&golden->builder, (enum tag)number, about);
		return true;
	}
	if (sscanf(line, "bytes %31s %llu %4095s", name, &number, value) == 3) {
		build_bytes(&golden->builder, (enum tag)number, bytes, from_hex(value, bytes, sizeof bytes));
		return true;
	}
	if (sscanf(line, "wire %4095s", value) == 1) {
		golden->size = from_hex(value, golden->wire, WIRE_BYTES_MAX);
		return true;
	}
	return false;
}

/* Rebuilds what was parsed: both directions meet in the same bytes. */
static bool rebuild(const struct frame *frame, uint8_t *bytes, size_t *size)
{
	struct builder builder = {.bytes = bytes, .size = WIRE_BYTES_MAX};
	struct field field;
	size_t at = 0;
	build_begin(&builder, (enum kind)frame->kind, frame->command);
	while (frame_next(frame, &at, &field))
		build_bytes(&builder, (enum tag)field.tag, field.data, field.size);
	bool built = build_end(&builder);
	*size = builder.at;
	return built;
}

static const char *check(struct golden *golden)
{
	uint8_t again[WIRE_BYTES_MAX];
	struct frame frame;
	const char *why = NULL;
	size_t need, size;
	for (size_t count = 0; count < golden->size; count++) {
		enum frame_status status = frame_parse(golden->wire, count, &frame, &need, &why);
		if (status == FRAME_WHOLE || (status == FRAME_BAD && !golden->bad))
			return "a part of it was not taken for a part";
		if (status == FRAME_PART && (need <= count || (!golden->bad && need > golden->size)))
			return "it asks for a wrong number of bytes";
	}
	enum frame_status status = frame_parse(golden->wire, golden->size, &frame, &need, &why);
	if (golden->bad)
		return status == FRAME_BAD && why != NULL ? NULL : "bad bytes were taken";
	if (status != FRAME_WHOLE || need != golden->size)
		return "it was not taken for a whole frame";
	if (!rebuild(&frame, again, &size) || size != golden->size)
		return "what was parsed has another size";
	if (golden->read_only)
		return NULL;
	if (memcmp(again, golden->wire, size) != 0)
		return "what was parsed is built differently";
	if (!build_end(&golden->builder) || golden->builder.at != size || memcmp(golden->built, golden->wire, size) != 0)
		return "its words are built differently";
	return NULL;
}

static const char *check_file(const char *path)
{
	static struct golden golden;
	char line[LINE_BYTES_MAX + 32];
	const char *why = NULL;
	memset(&golden, 0, sizeof golden);
	golden.builder = (struct builder){.bytes = golden.built, .size = sizeof golden.built};
	FILE *file = fopen(path, "r");
	if (file == NULL)
		return "it cannot be opened";
	while (why == NULL && fgets(line, sizeof line, file) != NULL)
		if (!read_line(&golden, line))
			why = "a line of it is not understood";
	(void)fclose(file);
	return why != NULL ? why : check(&golden);
}

/* A builder that is full refuses and leaves what was there. */
static const char *check_full(void)
{
	uint8_t bytes[64];
	struct builder builder = {.bytes = bytes, .size = sizeof bytes};
	build_begin(&builder, KIND_PING, 1);
	if (!build_end(&builder) || builder.at != FRAME_HEADER_BYTES)
		return "an empty frame does not fit";
	for (unsigned size = 0; size <= 60; size++) {
		build_begin(&builder, KIND_PONG, 2);
		build_bytes(&builder, TAG_DATA, bytes, size);
		bool fits = FRAME_HEADER_BYTES * 2 + FIELD_HEADER_BYTES + size <= sizeof bytes;
		if (build_end(&builder) != fits || (!fits && builder.at != FRAME_HEADER_BYTES))
			return "a frame that does not fit was built, or one that fits was not";
		builder.at = FRAME_HEADER_BYTES;
	}
	return NULL;
}

int main(int count, char **paths)
{
	int failed = 0;
	const char *why = check_full();
	if (why != NULL)
		failed += printf("builder: %s\n", why) > 0;
	for (int i = 1; i < count; i++)
		if ((why = check_file(paths[i])) != NULL)
			failed += printf("%s: %s\n", paths[i], why) > 0;
	if (failed > 0 || count < 2)
		return 1;
	(void)printf("%d golden frames agree\n", count - 1);
	return 0;
}
